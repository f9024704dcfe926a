// Puts the page together: what anywidget calls, what is redrawn when, and what shows without a kernel.

const VIEWS = {
  plasticity: PlasticityView, loss: LossView, timeline: TimelineView, savings: SavingsView, sieve: SieveView, sparsity: SparsityView,
  whatif: WhatIfView, attribution: AttributionView,
};
const REDRAWN_BY = {
  steps: ["loss", "timeline"], epochs: ["loss", "sieve", "sparsity"], plasticity: ["plasticity", "timeline", "whatif"],
  lanes: ["plasticity", "loss", "timeline", "whatif"], layers: ["plasticity", "timeline", "attribution"], ledger: ["savings"],
  commands: ["timeline", "sieve"], sieve: ["sieve"], pictures: ["sieve"], sparsity: ["sparsity"], settings: ["whatif"],
  race: ["whatif"], status: ["attribution"],
};
const WITHOUT_KERNEL_MS = 3500;
const UNSEEN_MS = 4000; // while training runs, a panel that is scrolled away is drawn no more often

class Page {
  constructor(model, root, kept) {
    this.model = model;
    this.choices = kept; // what the user chose to see: outlives this view
    this.root = root;
    this.id = Math.random().toString(36).slice(2, 8);
    this.data = new Data();
    this.dirty = new Set();
    this.unseen = new Set(); // panels that are scrolled away
    this.drawnAt = {};
    this.mine = new Map(); // key -> number of our request that is under way
    this.offline = false;
    this.Plotly = null;
    this.build();
    this.link = new Link(model, { onFrame: (content, buffers) => this.take(content, buffers), onSilence: (ms) => this.silence(ms), onAnswer: (content) => this.views[content.kind === "explained" ? "attribution" : "whatif"]?.take(content) });
    this.listen();
    this.theme = readTheme(root);
    this.drawState();
    this.arrange();
    this.redraw(...Object.keys(this.views));
    this.link.plotly().then((Plotly) => {
      this.Plotly = Plotly;
      this.redraw(...Object.keys(this.views));
    }, (error) => this.link.closed || this.say(`The chart library did not load: ${error.message}`));
    this.link.hello();
  }

  get layers() {
    return this.model.get("layers") || [];
  }

  // Some sessions, such as one on a cluster, cannot do everything: what they lack is not offered.
  lacks(what) {
    return (this.model.get("status")?.lacks || []).includes(what);
  }

  build() {
    this.root.className = "egl";
    // Keys that work our controls must not also move the notebook's selection.
    this.root.addEventListener("keydown", (event) => {
      const plain = !event.ctrlKey && !event.metaKey && !event.altKey;
      if (plain && event.target.matches("input, select, button, summary")) event.stopPropagation();
    });
    this.run = new RunBar(this);
    this.settings = new SettingsBar(this);
    this.alert = make("div", { class: "egl-alert", role: "alert", hidden: true });
    this.note = make("div", { class: "egl-note", role: "status", hidden: true });
    this.grid = make("div", { class: "egl-grid" });
    this.words = make("ol", { class: "egl-words", "aria-label": "Latest events, newest first" });
    this.log = make("section", { class: "egl-panel egl-log" }, make("h3", {}, "What happened"), this.words);
    this.kept = make("div", { class: "egl-kept", hidden: true });
    this.root.append(make("span", { class: "egl-probe" }), this.run.node, this.settings.node, this.alert, this.note, this.grid, this.kept, this.log);
    this.tip = new Tip(this.root);
    this.views = {};
    this.sections = {};
    for (const { key, title, hint } of this.model.get("panels") || []) {
      if (!VIEWS[key]) continue;
      const tools = make("div", { class: "egl-tools" }), body = make("div", { class: "egl-body" });
      const head = make("div", { class: "egl-head" }, make("h3", {}, title), tools);
      this.sections[key] = make("section", { class: `egl-panel egl-${key}`, "data-panel": key }, head, make("p", { class: "egl-hint" }, hint), body);
      this.grid.append(this.sections[key]);
      this.views[key] = new VIEWS[key]({ tools, body }, this);
    }
  }

  listen() {
    for (const trait of ["status", "settings", "layers", "words", "commands", "ledger", "notice", "sieve", "pictures", "race"]) {
      this.model.on(`change:${trait}`, () => {
        if (REDRAWN_BY[trait]) this.redraw(...REDRAWN_BY[trait]);
        if (trait !== "pictures" && trait !== "race") this.drawState();
      });
    }
    this.model.on("comm_live_update", () => this.link.hello()); // the kernel went or came back
    this.stopTheme = watchTheme(() => this.retheme());
    this.sizes = new ResizeObserver(() => {
      this.retheme(); // the first time we are in the page at all
      this.redraw("plasticity", "loss", "timeline", "sieve", "sparsity", "whatif");
    });
    for (const panel of [this.grid, ...this.grid.querySelectorAll(".egl-body")]) this.sizes.observe(panel);
    let onScreen = true;
    const look = () => {
      this.link.show(onScreen && document.visibilityState !== "hidden");
      if (this.link.visible) this.redraw();
    };
    this.watcher = new IntersectionObserver((entries) => {
      onScreen = entries.at(-1).isIntersecting;
      look();
    });
    this.watcher.observe(this.root);
    this.panelWatcher = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) this.unseen[isIntersecting ? "delete" : "add"](target.dataset.panel);
      this.redraw();
    });
    Object.values(this.sections).forEach((section) => this.panelWatcher.observe(section));
    document.addEventListener("visibilitychange", look);
    this.stopLooking = () => document.removeEventListener("visibilitychange", look);
  }

  // Style sheets load a moment after the theme's name has changed: look again a few times.
  retheme(waits = [60, 300, 1000]) {
    const theme = readTheme(this.root);
    if (JSON.stringify(theme) !== JSON.stringify(this.theme)) {
      this.theme = theme;
      this.redraw(...Object.keys(this.views));
    }
    clearTimeout(this.themeTimer);
    if (waits.length) this.themeTimer = setTimeout(() => this.retheme(waits.slice(1)), waits[0]);
  }

  // A frame arrived. Returns false when rows are missing.
  take(content, buffers) {
    const changed = this.data.take(content.parts, buffers);
    if (changed === null) return false;
    if (this.offline) this.connect();
    this.seq = content.seq;
    this.redraw(...changed.flatMap((table) => REDRAWN_BY[table]));
    if (!this.link.visible) this.link.acknowledge(content.seq, 0);
    return true;
  }

  redraw(...keys) {
    keys.forEach((key) => this.dirty.add(key));
    if (this.scheduled || !this.link?.visible) return;
    this.scheduled = requestAnimationFrame(() => {
      this.scheduled = null;
      if (!this.root.clientWidth) { // taken out of the page for a moment: nothing has a size now
        clearTimeout(this.laterTimer);
        this.laterTimer = setTimeout(() => this.redraw(), 150);
        return;
      }
      const started = performance.now();
      for (const key of this.dirty) {
        const view = this.views[key];
        if (this.mayWait(key, started)) continue;
        this.dirty.delete(key);
        if (!view || this.grid.hidden) continue;
        this.drawnAt[key] = started;
        const hidden = view.applies === false; // a panel that says nothing about this run is left out
        if (hidden !== this.sections[key].hidden) {
          this.sections[key].hidden = hidden;
          this.arrange();
        }
        if (view.applies !== false) view.draw();
      }
      if (this.seq !== this.acknowledged) {
        this.acknowledged = this.seq;
        this.afterPaint(() => this.link.acknowledge(this.seq, performance.now() - started));
      }
    });
  }

  // Nobody sees the panel, more is to come, and it was drawn not long ago.
  mayWait(key, now) {
    const runs = (this.model.get("status") || {}).state === "running" && !this.offline;
    return runs && this.unseen.has(key) && now - (this.drawnAt[key] ?? -UNSEEN_MS) < UNSEEN_MS;
  }

  // What drawing costs is known when the browser has laid out and painted it.
  afterPaint(then) {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      then();
    };
    port2.postMessage(null);
  }

  // Panels take half the width where there is room; one that would stand alone in its row takes all of it.
  arrange() {
    const shown = Object.keys(this.views).filter((key) => !this.sections[key].hidden);
    const halves = shown.filter((key) => key !== "sieve" && !this.views[key].wide);
    for (const key of shown) this.sections[key].classList.toggle("egl-whole", !halves.includes(key) || (halves.length % 2 === 1 && key === halves.at(-1)));
  }

  drawState() {
    this.settle();
    this.run.draw();
    this.settings.draw();
    const status = this.model.get("status") || {};
    this.alert.hidden = !status.error;
    setText(this.alert, status.error ? `Training failed: ${status.error}` : "");
    const notice = this.model.get("notice");
    if (notice && notice !== this.noticed) this.say(notice);
    this.noticed = notice;
    this.drawWords();
  }

  drawWords() {
    const words = this.model.get("words") || [], wanted = JSON.stringify(words);
    if (wanted === this.wordsDrawn) return;
    this.wordsDrawn = wanted;
    this.log.hidden = !words.length;
    this.words.replaceChildren(...[...words].reverse().map(({ step, text, kind }) =>
      make("li", { "data-kind": kind }, make("span", { class: "egl-step" }, `step ${say(step)}`), text)));
  }

  // -- requests ------------------------------------------------------------------------------------------

  request(wish, key) {
    this.mine.set(key, this.link.request(wish));
    this.drawState();
    this.redraw("timeline", "sieve");
  }

  isPending(key) {
    return this.mine.has(key) || (this.model.get("commands")?.pending || []).includes(key);
  }

  // Forget our requests that have landed; say why where one was rejected.
  settle() {
    const landed = new Map((this.model.get("commands")?.landed || []).map((row) => [row.number, row]));
    for (const [key, number] of this.mine) {
      const row = landed.get(number);
      if (!row) continue;
      this.mine.delete(key);
      if (row.as === "rejected") this.say(row.why);
    }
  }

  say(text) {
    setText(this.note, text);
    this.note.hidden = false;
    clearTimeout(this.noteTimer);
    this.noteTimer = setTimeout(() => { this.note.hidden = true; }, 8000);
  }

  // -- without a kernel ----------------------------------------------------------------------------------

  silence(ms) {
    if (this.offline || ms < WITHOUT_KERNEL_MS) return;
    this.offline = true;
    const picture = this.model.get("snapshot");
    if (picture && !this.data.tables.steps.rows) {
      this.grid.hidden = true;
      this.kept.innerHTML = picture;
    }
    this.kept.hidden = false;
    this.kept.prepend(make("p", { class: "egl-saved" }, picture ? "saved picture, kernel not connected" : "kernel not connected"));
    this.drawState();
    this.redraw("timeline", "sieve", "whatif", "attribution");
  }

  connect() {
    this.offline = false;
    this.grid.hidden = false;
    this.kept.hidden = true;
    this.kept.replaceChildren();
    this.drawState();
    this.redraw(...Object.keys(this.views));
  }

  close() {
    cancelAnimationFrame(this.scheduled);
    [this.noteTimer, this.themeTimer, this.laterTimer].forEach(clearTimeout);
    this.stopTheme();
    this.stopLooking();
    this.sizes.disconnect();
    this.watcher.disconnect();
    this.panelWatcher.disconnect();
    this.link.close();
    Object.values(this.views).forEach((view) => view.close());
  }
}

export default () => {
  const kept = { mode: "plasticity", x: "steps", whatif: {}, hiddenLayers: new Set(), layers: {}, more: false, attribution: { ids: "0, 1, 2, 3", method: "integrated_gradients", layer: "" } };
  return {
    render({ model, el }) {
      const root = document.createElement("div");
      el.append(root);
      const page = new Page(model, root, kept);
      return () => page.close();
    },
  };
};
