// What if: the recorded plasticity under other settings of the rule. Asks the kernel, draws two bars a layer.

const TUNED = ["tolerance", "window", "patience", "interval_steps"];
const ASK_AGAIN_MS = 2000, ASK_MS = 250, SHARE = 200; // of the kernel's time new readings cost at most so small a part

class WhatIfView {
  constructor(panel, context) {
    this.context = context;
    this.sliders = make("div", { class: "egl-tuner" });
    this.saved = make("p", { class: "egl-verdict", role: "status", "aria-live": "polite" });
    this.labels = make("div", { class: "egl-lane-labels" });
    this.lanes = make("div", { class: "egl-lanes" });
    this.axis = make("div", { class: "egl-lane-axis" }, make("span"), make("div"));
    this.why = make("p", { class: "egl-why" });
    this.key = make("div", { class: "egl-legend egl-key" });
    this.applyButton = make("button", { type: "button", class: "egl-mini egl-wish", onclick: () => this.apply(), title: "Gives the run these settings, from the next step on" }, "apply to the run");
    this.resetButton = make("button", { type: "button", class: "egl-mini egl-wish", onclick: () => this.reset(), title: "Back to the settings that the run has" }, "as in the run");
    panel.tools.append(this.resetButton, this.applyButton);
    this.scroller = make("div", { class: "egl-lane-scroller" }, this.labels, this.lanes);
    const tried = make("div", { class: "egl-tried" }, this.sliders, this.saved, this.scroller, this.axis, this.key, this.why), trained = make("div", { class: "egl-trained" });
    panel.body.append(make("div", { class: "egl-whatif-sides" }, tried, trained));
    this.race = new RaceView(trained, context, () => this.chosen);
    this.inputs = {};
  }

  get applies() {
    return this.settings().length > 0 && this.context.data.tables.plasticity.rows > 0;
  }

  settings() {
    const all = this.context.model.get("settings") || [];
    return TUNED.map((name) => all.find((row) => row.name === `freeze.${name}`)).filter(Boolean);
  }

  get chosen() {
    return this.context.choices.whatif;
  }

  // -- asking --------------------------------------------------------------------------------------------

  // One question under way and at most four a second; meanwhile only the newest wish is remembered.
  ask() {
    const wait = (this.askedAt ?? -ASK_MS) + ASK_MS - performance.now();
    if (this.asked !== undefined || wait > 0) {
      this.again = true;
      if (this.asked === undefined) this.askSoon ??= setTimeout(() => { this.askSoon = null; this.ask(); }, wait);
      return;
    }
    this.again = false;
    this.asked = Math.random().toString(36).slice(2);
    this.askedAt = performance.now();
    this.context.link.send({ kind: "whatif", number: this.asked, ...this.chosen });
    clearTimeout(this.lost);
    this.lost = setTimeout(() => { this.asked = undefined; }, 10000);
  }

  take({ number, answer }) {
    if (number !== this.asked) return;
    this.asked = undefined;
    this.answer = answer;
    this.restUntil = performance.now() + Math.max(ASK_AGAIN_MS, SHARE * (answer.took_ms || 0)); // new readings may wait
    if (this.again) this.ask();
    this.context.redraw("whatif");
  }

  // -- drawing -------------------------------------------------------------------------------------------

  draw() {
    this.drawSliders();
    this.race.draw();
    if (this.wide !== this.race.shown) {
      this.wide = this.race.shown; // two charts beside each other take the whole row
      this.context.arrange();
    }
    const { data, theme, offline } = this.context, { answer } = this;
    const stale = !answer || answer.last_step < data.tables.plasticity.lastStep;
    if (!offline && this.asked === undefined && stale && performance.now() > (this.restUntil || 0)) this.ask();
    else if (stale && this.asked === undefined && !this.later) {
      this.later = setTimeout(() => { this.later = null; this.context.redraw("whatif"); }, ASK_AGAIN_MS);
    }
    const moved = Object.keys(this.chosen).length > 0;
    this.applyButton.disabled = offline || !moved || this.changes().length === 0;
    this.resetButton.disabled = offline || !moved;
    if (!answer) {
      setText(this.saved, "reading the record …");
      return;
    }
    if (answer.problem) {
      setText(this.saved, answer.problem);
      return;
    }
    this.drawVerdict(answer, moved);
    this.drawLanes(answer);
    if (this.keyTheme !== theme) {
      this.keyTheme = theme;
      const entry = (glyph, colour, text) => make("span", {}, make("span", { class: "egl-glyph", style: `color:${colour}` }, glyph), text);
      this.key.replaceChildren(entry("▀", theme.muted, "above: frozen in the run"), entry("▄", theme.thaw, "below: frozen with these settings"), entry("▒", theme.muted, "shaded: an estimate, no longer exact"));
    }
  }

  drawVerdict(answer, moved) {
    const percent = (share) => `${(100 * share).toFixed(1)} %`, { layers } = this.context;
    setText(this.saved, `${moved ? "With these settings" : "With the run's own settings"}: ${answer.num_frozen} of ${layers.length} layers frozen after ${say(answer.last_step)} steps, `
      + `${percent(answer.saved)} of the FLOPs saved (the run: ${percent(answer.recorded)}).`);
    const exact = answer.exact_until === null ? "Exact to the end of the record." : `Exact up to step ${say(answer.exact_until)}; beyond, an estimate: ${answer.why}`;
    const snapshots = answer.kept_snapshots ? ` Snapshots are kept as recorded, one each ${answer.kept_snapshots} readings; a real run takes them as its window and patience say.` : "";
    setText(this.why, `${exact}${snapshots}${answer.blocked ? ` Last obstacle: ${answer.blocked}.` : ""}`);
  }

  get rowHeight() {
    return Math.max(14, Math.min(26, Math.floor(260 / this.context.layers.length)));
  }

  drawLanes(answer) {
    const { layers, theme, data, views } = this.context, height = this.rowHeight;
    const names = JSON.stringify([layers.map((row) => row.name), height]);
    if (names !== this.named) {
      this.named = names;
      this.labels.replaceChildren(...layers.map((row) => make("div", { class: "egl-lane-label", style: `height:${height}px` }, make("span", { class: "egl-lane-name" }, make("b", {}, row.name)))));
    }
    const width = Math.max(80, this.scroller.clientWidth - this.labels.offsetWidth), axis = sharedAxis(this.context);
    const place = (x) => (x / axis.end) * (width - 12) + 4, at = (step) => place(axis.of(step)), whole = height * layers.length;
    const story = views.timeline ? views.timeline.story() : { spans: [] }, half = Math.max(3, height / 2 - 3), out = [];
    const bar = (layer, from, to, y, colour, kind, text) => out.push(`<rect data-kind="${kind}" data-lane="${escapeHtml(layers[layer]?.name ?? "")}" data-from="${from}" x="${at(from)}" y="${y}" width="${Math.max(3, at(to) - at(from))}" height="${half}" rx="2" fill="${colour}" ${tip(text)}/>`);
    layers.forEach((row, i) => out.push(`<rect class="egl-active" x="${at(0)}" y="${(i + 0.5) * height - 1}" width="${at(data.lastStep) - at(0)}" height="1"/>`));
    for (const span of story.spans) {
      if (span.frozen) bar(span.layer, span.from, span.to, span.layer * height + 2, theme.muted, "recorded", `${layers[span.layer].name}: frozen in the run, steps ${say(span.from)} to ${say(span.to)}`);
    }
    for (const [layer, from, to, reason] of answer.spans) {
      const certain = answer.exact_until === null || from <= answer.exact_until;
      bar(layer, from, to ?? answer.last_step, (layer + 0.5) * height + 1, theme.thaw, "whatif", `${layers[layer]?.name ?? ""}: would be frozen from step ${say(from)}${to === null ? "" : ` to ${say(to)}`} (${certain ? "exact" : "an estimate"})\n${reason}`);
    }
    if (answer.exact_until !== null) out.push(this.shade(at(answer.exact_until), at(answer.last_step), whole, answer));
    this.lanes.innerHTML = `<svg width="${width}" height="${whole}" role="figure" aria-label="Which layers were frozen, and which would have been">${this.hatch()}${gridLines(place, axis.end, whole)}${out.join("")}</svg>`;
    this.axis.firstChild.style.width = `${this.labels.offsetWidth}px`;
    this.axis.lastChild.innerHTML = `<svg width="${width}" height="20">${axisLabels(place, axis.end, width, 14)}</svg>`;
  }

  hatch() {
    const id = `egl-beyond-${this.context.id}`, { muted } = this.context.theme;
    return `<defs><pattern id="${id}" width="8" height="8" patternTransform="rotate(45)" patternUnits="userSpaceOnUse"><rect width="1.5" height="8" fill="${muted}" fill-opacity="0.5"/></pattern></defs>`;
  }

  shade(from, to, height, { exact_until: until, why }) {
    const { theme } = this.context, width = Math.max(0, to - from);
    return `<rect class="egl-beyond" x="${from}" y="0" width="${width}" height="${height}" fill="url(#egl-beyond-${this.context.id})" pointer-events="none"/>` +
      `<line x1="${from}" x2="${from}" y1="0" y2="${height}" stroke="${theme.ink}" stroke-width="1.5" stroke-dasharray="4 3" ${tip(`exact up to step ${say(until)}\n${why}`)}/>`;
  }

  drawSliders() {
    const settings = this.settings(), built = settings.map((row) => row.name).join();
    if (built !== this.built) {
      this.built = built;
      this.inputs = {};
      this.sliders.replaceChildren(...settings.map((setting) => this.slider(setting)));
    }
    for (const setting of settings) {
      const { input, output, scale, short } = this.inputs[setting.name], value = this.chosen[short] ?? setting.value;
      if (document.activeElement !== input || !this.held) input.value = scale.place(value);
      setText(output, say(value));
      input.setAttribute("aria-valuetext", `${say(value)} ${setting.unit}`);
      input.disabled = this.context.offline;
    }
  }

  slider(setting) {
    const short = setting.name.split(".").pop(), id = `egl-${this.context.id}-whatif-${short}`, scale = new Scale(setting);
    const input = make("input", { type: "range", id, min: 0, max: scale.top, step: 1, title: `${setting.help} Tried on the record; the run is not touched.`, "data-whatif": short });
    input.addEventListener("input", () => {
      this.held = true;
      this.chosen[short] = scale.value(Number(input.value));
      this.drawSliders();
      this.ask();
    });
    input.addEventListener("change", () => { this.held = false; this.context.redraw("whatif"); });
    const output = make("output", { for: id });
    this.inputs[setting.name] = { input, output, scale, short };
    return make("div", { class: "egl-setting" }, make("label", { for: id }, `what if ${short.replaceAll("_", " ")}`), input, output);
  }

  changes() {
    return this.settings().map((row) => [row, this.chosen[row.name.split(".").pop()]]).filter(([row, value]) => value !== undefined && value !== row.value);
  }

  apply() {
    for (const [row, value] of this.changes()) this.context.request({ do: "set", name: row.name, value, layer: null }, `set:${row.name}:`);
  }

  reset() {
    Object.keys(this.chosen).forEach((name) => delete this.chosen[name]);
    this.ask();
    this.context.redraw("whatif");
  }

  close() {
    clearTimeout(this.askSoon);
    clearTimeout(this.lost);
    clearTimeout(this.later);
    this.race.close();
  }
}
