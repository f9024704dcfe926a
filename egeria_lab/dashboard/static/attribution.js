// Attribution: chosen samples of the paused step, a heat map (or bars) for each, and what flows through each layer.

const INPUTS = "the inputs";

class AttributionView {
  constructor(panel, context) {
    this.context = context;
    this.wide = true;
    const id = (name) => `egl-${context.id}-attribution-${name}`, kept = context.choices.attribution;
    this.ids = make("input", { type: "text", id: id("ids"), inputmode: "numeric", value: kept.ids, size: 12, autocomplete: "off", title: "Up to 8 ids of training samples, such as 3, 17", onchange: () => { kept.ids = this.ids.value; } });
    this.ids.addEventListener("keydown", (event) => event.key === "Enter" && this.ask());
    this.method = make("select", { id: id("method"), onchange: () => { kept.method = this.method.value; } });
    this.layer = make("select", { id: id("layer"), title: "The inputs, or the layer whose output is explained", onchange: () => { kept.layer = this.layer.value; } });
    this.button = make("button", { type: "button", class: "egl-mini egl-wish", onclick: () => this.ask() }, "explain");
    const choices = (context.model.get("panels") || []).find((row) => row.key === "attribution")?.choices || [];
    this.method.append(...choices.map((name) => make("option", { value: name, selected: name === kept.method }, name.replaceAll("_", " "))));
    const field = (name, input) => make("span", { class: "egl-field" }, make("label", { for: input.id }, name), input);
    this.line = make("p", { class: "egl-verdict", role: "status", "aria-live": "polite" });
    this.items = make("div", { class: "egl-explained" });
    this.flow = make("div", { class: "egl-bars" });
    this.key = make("p", { class: "egl-why" });
    panel.body.append(
      make("div", { class: "egl-form" }, field("sample ids", this.ids), field("method", this.method), field("of", this.layer), this.button),
      this.line, make("div", { class: "egl-attribution-found" }, this.items, this.flow), this.key);
  }

  get applies() {
    return !this.context.lacks("attribution");
  }

  // Another panel chose a sample: take its id and ask.
  choose(id) {
    this.ids.value = this.context.choices.attribution.ids = String(id);
    this.ids.scrollIntoView({ block: "nearest" });
    this.ask();
  }

  ask() {
    if (this.button.disabled) return;
    const ids = this.ids.value.split(/[\s,;]+/).filter(Boolean).map(Number);
    this.asked = Math.random().toString(36).slice(2);
    this.context.link.send({ kind: "attribute", number: this.asked, ids, method: this.method.value, layer: this.layer.value || null });
    clearTimeout(this.lost);
    this.lost = setTimeout(() => { this.asked = undefined; this.draw(); }, 120000);
    this.draw();
  }

  take({ number, answer }) {
    if (number !== this.asked) return;
    this.asked = undefined;
    clearTimeout(this.lost);
    this.context.choices.attribution.answer = answer;
    this.draw();
  }

  draw() {
    this.drawLayers();
    const status = this.context.model.get("status") || {}, runs = status.state === "running", { offline } = this.context;
    this.button.disabled = offline || runs || this.asked !== undefined;
    this.button.title = runs ? "Pause the run first: attribution looks at the model while it stands still" : "Explain these samples by the model of this step; nothing in it changes";
    const { answer } = this.context.choices.attribution;
    setText(this.line, this.words(answer, runs));
    const wanted = JSON.stringify([answer?.step, answer?.took_ms, answer?.problem]);
    if (wanted === this.drawn) return;
    this.drawn = wanted;
    const found = answer && !answer.problem;
    this.items.replaceChildren(...(found ? answer.items.map((item) => this.item(item, answer)) : []));
    this.flow.replaceChildren(...(found ? this.layers(answer) : []));
    setText(this.key, !found ? "" : `${answer.signed ? "Orange speaks for the class, blue against it" : "Orange: what the score depends on"}; the stronger, the more. `
      + `Score of the class against a blank input: ${say(answer.score_change)}${answer.delta === null ? "" : `, of which ${say(answer.delta)} is not accounted for`}.`);
  }

  words(answer, runs) {
    if (this.asked !== undefined) return "looking at the model … (the first time loads Captum, some seconds)";
    if (runs) return answer && !answer.problem ? `As of step ${say(answer.step)}. Pause the run to look again.` : "Pause the run first: the model is looked at while it stands still.";
    if (!answer) return "Choose sample ids and press explain.";
    return answer.problem || `Step ${say(answer.step)}: ${answer.method.replaceAll("_", " ")} of ${answer.where}.`;
  }

  drawLayers() {
    const names = this.context.layers.map((row) => row.name), wanted = JSON.stringify(names);
    if (wanted === this.named) return;
    this.named = wanted;
    const kept = this.context.choices.attribution.layer;
    this.layer.replaceChildren(make("option", { value: "" }, INPUTS), ...names.map((name) => make("option", { value: name, selected: name === kept }, name)));
  }

  item({ id, class: name, picture, heat, bars }, { where }) {
    const title = make("figcaption", {}, make("b", {}, `#${id}`), name ? ` ${name}` : "");
    if (heat) {
      const image = (src, alt) => make("img", { src, alt, width: 60, height: 60 });
      return make("figure", { class: "egl-explained-item" }, make("div", { class: "egl-twins" }, image(picture, `sample ${id}`), image(heat, `sample ${id}: attributions of ${where}`)), title);
    }
    const most = Math.max(...bars.map(([, value]) => Math.abs(value))) || 1;
    return make("figure", { class: "egl-explained-item egl-explained-bars" }, title, ...bars.map(([word, value]) => this.bar(word, Math.abs(value) / most, value < 0 ? "egl-against" : "egl-for", say(value))));
  }

  bar(name, share, kind, words, about = "") {
    return make("div", { class: "egl-bar-row egl-flow-row", "data-tip": about || `${name}: ${words}` }, make("span", { class: "egl-bar-name" }, name),
      make("span", { class: "egl-track", "aria-hidden": "true" }, make("span", { class: `egl-part ${kind}`, style: `width:${100 * share}%` })), make("span", { class: "egl-bar-words" }, words));
  }

  when({ since, why }) {
    return `step ${say(since)}${why ? `, when ${why}` : ", the first look"}`;
  }

  layers({ layers, drift }) {
    if (!layers.length) return [];
    const most = Math.max(...layers.map(({ mean_abs: size }) => size ?? 0)) || 1;
    const moved = drift ? ` and how far it moved since ${this.when(drift)}` : "";
    const rows = layers.map(({ name, state, since, mean_abs: size, total }) => {
      const frozen = state === "frozen", drifted = drift?.layers[name];
      const words = `${say(size)}${drifted ? `, moved ${say(drifted.relative_l2)}` : ""}${frozen ? ", frozen" : ""}`;
      const about = `${name}: ${frozen ? `frozen since step ${say(since)}` : state}\nmean |conductance| ${say(size)}, change of the score through it ${say(total)}`
        + (drifted ? `\nsince ${this.when(drift)}: relative change ${say(drifted.relative_l2)}, cosine ${say(drifted.cosine)}` : "");
      return this.bar(name, (size ?? 0) / most, frozen ? "egl-frozen-flow" : "egl-active-flow", words, about);
    });
    const maps = drift ? [make("p", { class: "egl-why" }, `The maps themselves: relative change ${say(drift.maps.relative_l2)}, cosine ${say(drift.maps.cosine)} since ${this.when(drift)}.`)] : [];
    return [make("h4", {}, `What flows through each layer (hatched: frozen)${moved}`), make("div", { class: "egl-flows", tabindex: rows.length > 12 ? "0" : null, role: "group", "aria-label": "Layers" }, ...rows), ...maps];
  }

  close() {
    clearTimeout(this.lost);
  }
}
