// Play, pause, stop; the line of state; one slider a setting. Each does nothing but send a request.

const ICONS = {
  step: "M2 1.5v11l7-5.5zM10 1.5h2.5v11H10z",
  undo: "M5.6 1.2L1.2 5.2l4.4 4V6.6h2.6a2.2 2.2 0 0 1 0 4.4H4.4v2h3.8a4.2 4.2 0 0 0 0-8.4H5.6z", redo: "M8.4 1.2l4.4 4-4.4 4V6.6H5.8a2.2 2.2 0 0 0 0 4.4h3.8v2H5.8a4.2 4.2 0 0 1 0-8.4h2.6z",
  play: "M3 1.5v11l9-5.5z", pause: "M2.5 1.5h3v11h-3zM8.5 1.5h3v11h-3z", stop: "M2 2h10v10H2z",
};

function iconButton(action, press) {
  const button = make("button", { type: "button", class: "egl-button", "data-action": action, onclick: press });
  button.innerHTML = `<svg viewBox="0 0 14 14" width="14" height="14" aria-hidden="true"><path d="${ICONS[action]}" fill="currentColor"/></svg><span></span>`;
  return button;
}

class RunBar {
  constructor(context) {
    this.context = context;
    const press = (action) => () => context.request({ do: action }, `run:${action}`);
    this.buttons = Object.fromEntries(["play", "pause", "step", "stop"].map((action) => [action, iconButton(action, press(action))]));
    this.memory = Object.fromEntries(["undo", "redo"].map((action) => [action, iconButton(action, press(action))]));
    for (const [action, button] of Object.entries(this.memory)) {
      button.classList.add("egl-memory");
    }
    this.extend = this.wish("+1 epoch", { do: "extend", epochs: 1 }, "extend",
      "Lengthen the plan by one pass over the data; the learning-rate schedule is planned again. Applies: next step");
    this.halve = this.wish("halve rate", { do: "halve_rate" }, "set:optimizer.lr:", "Halve the peak learning rate. Applies: next step");
    this.name = make("strong", { class: "egl-name" });
    this.state = make("span", { class: "egl-state" });
    this.line = make("span", { class: "egl-line", role: "status", "aria-live": "polite" });
    this.fill = make("span", { class: "egl-progress-fill" });
    this.progress = make("div", { class: "egl-progress", role: "progressbar", "aria-label": "Training progress", "aria-valuemin": "0" }, this.fill);
    this.node = make("div", { class: "egl-run" },
      make("div", { class: "egl-pressed" },
        make("div", { class: "egl-buttons", role: "group", "aria-label": "Run" }, ...Object.values(this.buttons)),
        make("div", { class: "egl-buttons", role: "group", "aria-label": "Undo and redo" }, ...Object.values(this.memory))),
      make("div", { class: "egl-where" }, make("div", { class: "egl-title" }, this.name, this.state), this.line),
      make("div", { class: "egl-extra" }, this.extend, this.halve, this.axisChoice()), this.progress);
  }

  // A button for a command: marked while it waits for the next step.
  wish(word, wish, key, about) {
    const button = make("button", { type: "button", class: "egl-mini egl-wish", title: about, onclick: () => this.context.request(wish, key) }, word);
    button.key = key;
    return button;
  }

  axisChoice() {
    const { context } = this, id = `egl-${context.id}-x`;
    const options = Object.keys(X_AXES).map((name) => make("option", { value: name, selected: name === context.choices.x }, name));
    const select = make("select", { id, title: "What all charts have along their x axis", onchange: () => {
      context.choices.x = select.value;
      context.redraw(...Object.keys(context.views));
    } }, ...options);
    return make("span", { class: "egl-axis-choice" }, make("label", { for: id }, "x axis"), select);
  }

  draw() {
    const { model, offline } = this.context, status = model.get("status") || {}, { state } = status;
    setText(this.name, status.name || "");
    setText(this.state, offline ? "kernel not connected" : state || "");
    this.state.dataset.state = offline ? "gone" : state;
    setText(this.line, status.text || "");
    const can = { play: state !== "running", pause: state === "running", step: state === "paused", stop: state === "running" || state === "paused" };
    const words = { play: { paused: "Resume", idle: "Start" }[state] || "Play", pause: "Pause", step: "Step", stop: "Stop" };
    const hints = { play: "Train in the background", pause: "Pause at the next step boundary; everything is kept", step: "Train one step and pause again; works while paused", stop: "End the run at the next step boundary; the model stays usable" };
    for (const [action, button] of Object.entries(this.buttons)) {
      setText(button.lastChild, words[action]);
      button.disabled = offline || !can[action];
      button.title = `${words[action]}: ${hints[action]}`;
    }
    this.drawMemory(status, offline);
    const rate = (model.get("settings") || []).find((row) => row.name === "optimizer.lr");
    setText(this.halve, rate ? `halve rate (${say(rate.value)})` : "halve rate");
    this.halve.hidden = !rate;
    for (const button of [this.extend, this.halve]) {
      button.disabled = offline;
      button.classList.toggle("egl-waiting", this.context.isPending(button.key));
    }
    const share = status.planned ? Math.min(1, status.step / status.planned) : 0;
    this.fill.style.width = `${100 * share}%`;
    this.progress.setAttribute("aria-valuemax", String(status.planned || 0));
    this.progress.setAttribute("aria-valuenow", String(status.step || 0));
  }

  // Undo and redo: the tooltip says what would be taken back, or why there is nothing.
  drawMemory(status, offline) {
    for (const [action, button] of Object.entries(this.memory)) {
      const what = status[action], why = status[`why_no_${action}`];
      const pending = this.context.isPending(action) || this.context.isPending(`run:${action}`);
      button.disabled = offline || !what || pending;
      button.classList.toggle("egl-waiting", pending);
      const known = action === "undo"
        ? `Undo: ${what}. Goes back to the state right before it, steps made since included. Applies: next step`
        : `Redo: ${what}. Applies: next step`;
      button.title = what ? known : `Nothing to ${action}${why ? `: ${why}` : ""}`;
      button.setAttribute("aria-label", button.title);
    }
  }
}

// Where a value stands on a slider, and back: logarithmic where the setting asks for it.
class Scale {
  constructor({ low, high, log, integer }) {
    Object.assign(this, { low, high, integer, log: log && low > 0 });
    this.top = integer && !this.log ? high - low : 400;
  }

  place(value) {
    const share = this.log ? Math.log(value / this.low) / Math.log(this.high / this.low) : (value - this.low) / (this.high - this.low);
    return Math.round(Math.min(1, Math.max(0, share)) * this.top);
  }

  value(place) {
    const share = place / this.top;
    if (share <= 0) return this.low;
    if (share >= 1) return this.high;
    const exact = this.log ? this.low * (this.high / this.low) ** share : this.low + share * (this.high - this.low);
    return this.integer ? Math.round(exact) : Number(exact.toPrecision(3));
  }
}

class SettingSlider {
  constructor(setting, context) {
    this.context = context;
    this.name = setting.name;
    this.scale = new Scale(setting);
    const id = `egl-${context.id}-${setting.name.replace(/\W/g, "-")}`;
    const short = setting.name.split(".").pop().replaceAll("_", " ");
    const about = `${setting.help}${setting.help ? ". " : ""}Applies: ${setting.applies}.`;
    this.input = make("input", { type: "range", id, min: 0, max: this.scale.top, step: 1, title: about, "data-setting": setting.name });
    this.input.addEventListener("input", () => this.moving());
    this.input.addEventListener("change", () => this.moved());
    this.output = make("output", { for: id });
    this.pending = make("span", { class: "egl-pending", hidden: true }, "pending");
    this.reset = make("button", { type: "button", class: "egl-mini", onclick: () => this.back() }, "Reset");
    this.node = make("div", { class: "egl-setting" });
    this.label = make("label", { for: id, title: about }, short);
    this.node.append(this.label);
    if (setting.per_layer) this.node.append(this.layerChoice(short));
    this.node.append(this.input, this.output, this.pending, this.reset, make("small", { class: "egl-applies" }, `applies: ${setting.applies}`));
  }

  layerChoice(short) {
    this.choice = make("select", { "aria-label": `Layer that the ${short} is set for`, onchange: () => {
      this.context.choices.layers[this.name] = this.choice.value;
      this.draw();
    } });
    return this.choice;
  }

  get setting() {
    return (this.context.model.get("settings") || []).find((row) => row.name === this.name);
  }

  get layer() {
    return this.choice?.value || null;
  }

  get key() {
    return `set:${this.name}:${this.layer || ""}`;
  }

  current() {
    const { value, layers } = this.setting;
    return this.layer in layers ? layers[this.layer] : value;
  }

  moving() {
    this.held = true;
    setText(this.output, this.words(this.scale.value(Number(this.input.value))));
  }

  moved() {
    this.held = false;
    const value = this.scale.value(Number(this.input.value));
    this.sent = value;
    this.context.request({ do: "set", name: this.name, value, layer: this.layer }, this.key);
    setText(this.output, this.words(value));
  }

  back() {
    this.sent = undefined;
    this.context.request({ do: "reset", name: this.name, layer: this.layer }, this.key);
  }

  words(value) {
    const { unit } = this.setting;
    return unit ? `${say(value)} ${unit}` : say(value);
  }

  draw() {
    const { setting } = this, { offline } = this.context;
    if (!setting) return;
    this.drawChoice(setting);
    const pending = this.context.isPending(this.key), value = this.current();
    if (!pending) this.sent = undefined;
    this.pending.hidden = !pending;
    const shown = this.sent ?? value;
    if (!this.held) {
      this.input.value = this.scale.place(shown);
      setText(this.output, this.words(shown));
    }
    this.input.setAttribute("aria-valuetext", this.words(shown));
    const start = this.layer ? setting.value : setting.default;
    this.reset.style.visibility = value === start ? "hidden" : "visible";
    this.reset.title = this.layer ? `Back to the value of all layers, ${this.words(start)}` : `Back to ${this.words(start)}`;
    this.input.disabled = this.reset.disabled = offline;
  }

  drawChoice({ layers: own }) {
    if (!this.choice) return;
    const names = this.context.layers.map((row) => row.name), wanted = JSON.stringify([names, own]);
    if (wanted === this.choiceDrawn) return;
    this.choiceDrawn = wanted;
    const chosen = this.context.choices.layers[this.name] ?? "";
    const option = (value, text) => make("option", { value }, text);
    this.choice.replaceChildren(option("", "all layers"), ...names.map((name) => option(name, name in own ? `${name} (own)` : name)));
    this.choice.value = names.includes(chosen) ? chosen : "";
  }
}

class SettingsBar {
  constructor(context) {
    this.context = context;
    this.first = make("div", { class: "egl-first" });
    this.rest = make("div", { class: "egl-rest" });
    this.more = make("details", { class: "egl-more", open: context.choices.more, ontoggle: () => { context.choices.more = this.more.open; } }, make("summary", {}, "more settings"), this.rest);
    this.node = make("div", { class: "egl-settings" }, this.first, this.more);
    this.sliders = [];
  }

  draw() {
    const settings = this.context.model.get("settings") || [], names = settings.map((row) => row.name).join();
    if (names !== this.built) {
      this.built = names;
      this.sliders = settings.map((setting) => new SettingSlider(setting, this.context));
      const primary = settings.map((setting) => setting.primary);
      this.first.replaceChildren(...this.sliders.filter((_, i) => primary[i]).map((slider) => slider.node));
      this.rest.replaceChildren(...this.sliders.filter((_, i) => !primary[i]).map((slider) => slider.node));
      this.more.hidden = primary.every(Boolean);
    }
    this.sliders.forEach((slider) => slider.draw());
  }
}
