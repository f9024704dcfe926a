// Samples: kept, set aside, discarded over time; how often they are forgotten; and some of them to look at.

const PARTS = [["kept", "trained on"], ["waiting", "set aside"], ["discarded", "discarded by hand"]];
const MOST_EXCHANGES = 100, MOST_UPRIGHTS = 16;
const times = (number) => (number === 1 ? "once" : `${say(number)} times`);

class SieveView {
  constructor(panel, context) {
    this.context = context;
    this.plot = new Plot(make("div", { class: "egl-sieve-plot" }), context, (point) => this.describe(point));
    this.plot.node.setAttribute("aria-label", "Samples trained on, set aside and discarded against the training step");
    this.key = make("div", { class: "egl-legend egl-key" });
    this.plot.node.parentNode.append(this.key);
    this.histogram = make("div", { class: "egl-bars" });
    this.classes = make("div", { class: "egl-bars" });
    this.sheet = make("div", { class: "egl-sheet" });
    this.detail = make("div", { class: "egl-detail", role: "status", "aria-live": "polite" });
    this.sheet.addEventListener("click", (event) => this.choose(event));
    panel.body.append(
      make("div", { class: "egl-sieve-top" }, this.plot.node.parentNode, this.histogram, this.classes), this.sheet, this.detail);
    this.fromHead = panel.tools;
  }

  get state() {
    return this.context.model.get("sieve") || {};
  }

  get applies() {
    return Boolean(this.state.total) || this.context.data.tables.sieve.rows > 0;
  }

  draw() {
    this.drawPlot();
    this.drawBars();
    this.drawSheet();
    this.drawDetail();
    const { method, kept, total } = this.state;
    setText(this.fromHead, total ? `${method}: ${say(kept)} of ${say(total)} samples trained on` : "");
  }

  colours() {
    const { theme } = this.context;
    return { kept: theme.rule, waiting: theme.hand, discarded: theme.pin };
  }

  drawPlot() {
    const { data, theme } = this.context, table = data.tables.sieve, axis = sharedAxis(this.context), colours = this.colours();
    const rows = table.drawn(table.all()), end = data.lastStep;
    this.rows = rows.length && table.step[rows.at(-1)] < end ? [...rows, rows.at(-1)] : rows; // what holds, holds until now
    const x = this.rows.map((row, i) => axis.of(i >= rows.length ? end : table.step[row]));
    const looks = { kept: "", waiting: "/", discarded: "x" };
    const traces = PARTS.map(([name]) => ({
      type: "scatter", mode: "lines", x, y: this.rows.map((row) => table.columns[name][row]), stackgroup: "all", hoverinfo: "none", hoveron: "points",
      line: { shape: "hv", width: 1.5, color: colours[name] }, fillcolor: `${colours[name]}${theme.dark ? "66" : "55"}`,
      fillpattern: { shape: looks[name], fgcolor: colours[name], bgcolor: `${colours[name]}22`, size: 7, solidity: 0.25 },
    }));
    const exchanges = rows.filter((row) => table.columns.removed[row] + table.columns.returned[row] > 0).slice(-MOST_EXCHANGES);
    traces.push({
      type: "scatter", mode: "markers", x: exchanges.map((row) => axis.of(table.step[row])), y: exchanges.map(() => 0.5), yaxis: "y2", hoverinfo: "none",
      exchanges, cliponaxis: false, marker: { size: 9, symbol: "triangle-down", color: theme.muted },
    });
    this.plot.draw(traces, {
      xaxis: { ...axis.plotly, anchor: "y" }, uirevision: axis.chosen, hovermode: "closest",
      yaxis: { domain: [0, 0.93], rangemode: "tozero", title: { text: "samples", standoff: 10 } },
      yaxis2: { domain: [0.95, 1], range: [0, 1], visible: false, fixedrange: true },
      shapes: (exchanges.length > MOST_UPRIGHTS ? [] : traces.at(-1).x).map((at) => ({ type: "line", x0: at, x1: at, yref: "paper", y0: 0, y1: 0.95, layer: "above", line: { color: theme.muted, width: 1, dash: "dot" } })),
    });
    if (this.keyTheme === theme) return;
    this.keyTheme = theme;
    const entry = (glyph, colour, text) => make("span", {}, make("span", { class: "egl-glyph", style: `color:${colour}` }, glyph), text);
    this.key.replaceChildren(
      entry("■", colours.kept, "trained on"), entry("▨", colours.waiting, "set aside"), entry("▩", colours.discarded, "discarded by hand"),
      entry("▼", theme.muted, "samples exchanged"));
  }

  describe(point) {
    const table = this.context.data.tables.sieve, row = point.data.exchanges?.[point.pointIndex] ?? this.rows?.[point.pointIndex];
    if (row === undefined) return "";
    const at = (name) => say(table.columns[name][row]);
    return [
      `from step ${say(table.step[row])}: ${at("kept")} trained on, ${at("waiting")} set aside, ${at("discarded")} discarded`,
      `${at("removed")} samples went out, ${at("returned")} came in`,
    ].join("\n");
  }

  // -- bars: plain HTML, a chart would cost more and say no more -----------------------------------------

  drawBars() {
    const { histogram = [], why_no_histogram: why = "", classes = [] } = this.state;
    const wanted = JSON.stringify([histogram, why, classes, this.context.theme.dark]);
    if (wanted === this.barsDrawn) return;
    this.barsDrawn = wanted;
    const most = Math.max(1, ...histogram.map(([, number]) => number)), colours = this.colours();
    this.histogram.replaceChildren(
      make("h4", {}, "Forgotten how often, since the last exchange"),
      ...(histogram.length ? histogram.map(([name, number]) => this.bar(
        /^\d/.test(name) ? `${name} ×` : name, [[number / most, colours.kept, ""]], say(number), `${say(number)} samples: ${/^\d/.test(name) ? `forgotten ${name} times` : name}`)) : [make("p", { class: "egl-why" }, why)]));
    const largest = Math.max(1, ...classes.map(({ total }) => total));
    this.classes.hidden = !classes.length;
    this.classes.replaceChildren(
      make("h4", {}, "Trained on, in each class"),
      ...classes.map(({ name, total, kept, discarded }) => this.bar(name, [
        [kept / largest, colours.kept, ""], [(total - kept - discarded) / largest, colours.waiting, "egl-hatched"], [discarded / largest, colours.discarded, "egl-crossed"],
      ], `${Math.round(100 * kept / total)} %`, `${name}: ${say(kept)} of ${say(total)} trained on, ${say(total - kept - discarded)} set aside, ${say(discarded)} discarded`)));
  }

  bar(name, shares, words, about) {
    const fills = shares.map(([share, colour, kind]) => make("span", { class: `egl-part ${kind}`, style: `width:${100 * share}%;--egl-part:${colour}` }));
    return make("div", { class: "egl-bar-row", "data-tip": about }, make("span", { class: "egl-bar-name" }, name),
      make("span", { class: "egl-track", "aria-hidden": "true" }, ...fills), make("span", { class: "egl-bar-words" }, words));
  }

  // -- the contact sheet ---------------------------------------------------------------------------------

  drawSheet() {
    const { groups = [] } = this.state, pictures = this.context.model.get("pictures") || {};
    const wanted = JSON.stringify([groups, Object.keys(pictures)]);
    if (wanted === this.sheetDrawn) return;
    this.sheetDrawn = wanted;
    const focused = this.sheet.contains(document.activeElement) ? document.activeElement.dataset.sample : null;
    this.items = new Map(groups.flatMap(({ items }) => items.map((item) => [String(item.id), item])));
    this.sheet.replaceChildren(...groups.map(({ key, title, items }) => make("section", { class: "egl-group", "data-group": key },
      make("h4", {}, title), make("div", { class: "egl-samples" }, ...items.map((item) => this.sample(item, pictures[item.id]))))));
    if (focused !== null) this.sheet.querySelector(`[data-sample="${focused}"]`)?.focus();
  }

  sample(item, picture) {
    const { id, label, where } = item, about = `sample ${id}${label === "" ? "" : `, ${label}`}, ${where}`;
    return make("button", { type: "button", class: `egl-sample${picture ? "" : " egl-wordy"}`, "data-sample": id, "data-where": where, "aria-label": about, "data-tip": about },
      picture ? make("img", { src: picture, alt: "", width: 42, height: 42 }) : make("b", {}, `#${id}`), make("span", {}, label === "" ? `#${id}` : label));
  }

  choose(event) {
    const button = event.target.closest("button[data-sample]");
    if (!button) return;
    this.chosen = this.chosen === button.dataset.sample ? null : button.dataset.sample;
    this.last = this.items.get(this.chosen) || null;
    this.drawDetail();
  }

  drawDetail() {
    for (const button of this.sheet.querySelectorAll("button[data-sample]")) button.setAttribute("aria-pressed", String(button.dataset.sample === this.chosen));
    const item = this.last = this.items?.get(this.chosen) || this.last;
    const pending = Boolean(item) && this.context.isPending(`samples:${item.id}`), picture = item && (this.context.model.get("pictures") || {})[item.id];
    const wanted = JSON.stringify([this.chosen ? item : null, pending, this.context.offline, Boolean(picture)]);
    if (wanted === this.detailDrawn) return;
    this.detailDrawn = wanted;
    this.detail.hidden = !this.chosen || !item;
    if (this.detail.hidden) return;
    const out = item.where === "discarded", action = out ? "restore" : "discard";
    const effect = out ? "gives it back to training, from the next step on" : "takes it out of training until it is restored, from the next step on";
    const button = make("button", {
      type: "button", class: "egl-mini egl-wish", title: effect, disabled: this.context.offline || pending,
      onclick: () => this.context.request({ do: action, ids: [item.id] }, `samples:${item.id}`),
    }, `${out ? "Restore" : "Discard"} sample ${item.id}`);
    this.detail.replaceChildren(...[
      picture ? make("img", { src: picture, alt: "", width: 88, height: 88 }) : null,
      make("div", {}, make("div", {}, make("b", {}, `id ${item.id}`), item.label === "" ? "" : `, label ${item.label}, ${item.where}`), make("div", { class: "egl-why" }, this.facts(item)),
        make("div", { class: "egl-detail-do" }, button, this.explain(item), pending ? make("span", { class: "egl-pending" }, "pending") : "", make("small", { class: "egl-applies" }, `${effect}`))),
    ].filter(Boolean));
  }

  explain({ id }) {
    return make("button", { type: "button", class: "egl-mini egl-wish", title: "Show why the model says what it says of this sample", onclick: () => this.context.views.attribution?.choose(id) }, "Explain");
  }

  facts({ seen, events, never, margin, loss }) {
    const facts = [`presented ${times(seen)} since the last exchange`];
    if (events !== undefined) facts.push(never ? "never classified rightly" : `forgotten ${times(events)}`);
    if (margin !== undefined) facts.push(`mean margin ${say(margin)}`);
    if (loss !== undefined) facts.push(`newest loss ${say(loss)}`);
    return facts.join(", ");
  }

  close() {
    this.plot.close();
  }
}
