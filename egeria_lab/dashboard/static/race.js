// The what-if panel's second mode: a fork with the tried settings is really trained beside the run.

const RACE_STEPS = 200;

class RaceView {
  constructor(box, context, chosen) {
    this.context = context;
    this.shown = false;
    this.chosen = chosen; // () => the settings that are tried
    const id = `egl-${context.id}-race`;
    this.steps = make("input", { type: "number", id, min: 1, step: 1, value: context.choices.race || RACE_STEPS, onchange: () => { context.choices.race = Number(this.steps.value); } });
    this.button = make("button", { type: "button", class: "egl-mini egl-wish", onclick: () => this.press() }, "train a fork");
    this.line = make("span", { class: "egl-applies", role: "status", "aria-live": "polite" });
    this.chart = make("div", { class: "egl-race-chart", hidden: true });
    this.plot = new Plot(this.chart, context, (point) => this.describe(point));
    this.plot.node.setAttribute("aria-label", "Loss of the run and of its fork against the training step");
    this.key = make("div", { class: "egl-legend egl-key" });
    this.verdict = make("p", { class: "egl-why" });
    this.chart.append(this.key, this.verdict);
    this.node = make("div", { class: "egl-race" }, make("label", { for: id }, "Try it in earnest, for"), this.steps, make("span", {}, "steps"), this.button, this.line);
    box.append(this.node, this.chart);
  }

  get state() {
    return this.context.model.get("race") || {};
  }

  get trains() {
    return ["forking", "training"].includes(this.state.phase);
  }

  press() {
    const { link } = this.context;
    if (this.trains) link.send({ kind: "race" });
    else link.send({ kind: "race", steps: Math.max(1, Math.round(Number(this.steps.value) || RACE_STEPS)), ...this.chosen() });
    this.asked = performance.now();
  }

  draw() {
    const { state, trains } = this, { offline } = this.context;
    this.node.hidden = this.context.lacks("fork");
    setText(this.button, trains ? "stop" : "train a fork");
    this.button.title = trains ? "End the fork at its next step, and pause the run if it was started for this"
      : "Fork the run from this step, give the fork these settings, and train both; the fork is closed at the end";
    this.button.disabled = offline;
    this.steps.disabled = offline || trains;
    setText(this.line, this.words(state));
    this.shown = Boolean(state.loss?.[0].length || state.run_loss?.[0].length);
    this.chart.hidden = !this.shown;
    if (this.shown) this.drawChart(state);
  }

  words({ phase, problem, from, until, step }) {
    if (phase === "failed") return problem;
    if (phase === "forking") return "forking …";
    if (phase === "training") return `fork at step ${say(step ?? from)} of ${say(from)} to ${say(until)}`;
    if (phase === "done" || phase === "stopped") return `${phase}: fork from step ${say(from)} to ${say(step)}, closed again`;
    return "the run and a fork with these settings, side by side from this step";
  }

  drawChart(state) {
    const { theme } = this.context, mine = theme.layers[0], other = theme.dark ? "#E69F00" : "#D55E00";
    const line = ([x, y] = [[], []], called, color, dash, yaxis = "y") => ({
      type: "scatter", mode: yaxis === "y" ? "lines" : "lines+markers", x, y, yaxis, called, hoverinfo: "none", line: { color, dash, width: 2 }, marker: { size: 6, symbol: dash === "solid" ? "circle" : "square", color },
    });
    const traces = [line(state.run_loss, "the run: loss", mine, "solid"), line(state.loss, "the fork: loss", other, "dash")];
    const checked = state.valid?.[0].length || state.run_valid?.[0].length;
    if (checked) traces.push(line(state.run_valid, "the run: accuracy", mine, "solid", "y2"), line(state.valid, "the fork: accuracy", other, "dash", "y2"));
    const room = 0.02 * (state.until - state.from) || 1;
    this.plot.draw(traces, {
      xaxis: { range: [state.from, state.until + room], title: { text: "training step", standoff: 6 }, anchor: checked ? "y2" : "y" }, uirevision: String(state.from),
      yaxis: { domain: checked ? [0.46, 1] : [0, 1], nticks: 5, title: { text: "loss", standoff: 10 } },
      ...(checked ? { yaxis2: { domain: [0, 0.36], tickformat: ".3~p", nticks: 4, title: { text: "accuracy", standoff: 10 } } } : {}),
    });
    if (this.keyTheme !== theme) {
      this.keyTheme = theme;
      const entry = (glyph, colour, text) => make("span", {}, make("span", { class: "egl-glyph", style: `color:${colour}` }, glyph), text);
      this.key.replaceChildren(entry("━", mine, "the run (mean of 20 steps)"), entry("┅", other, "the fork, with these settings"));
    }
    const changed = Object.entries(state.changes || {}).map(([name, value]) => `${name.replaceAll("_", " ")} ${say(value)}`).join(", ");
    const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)} %`);
    const last = (line) => (line?.[1].length ? `, accuracy ${percent(line[1].at(-1))}` : "");
    setText(this.verdict, `The fork (${changed || "settings as in the run"}): ${percent(state.saved)} of the FLOPs of these steps saved${last(state.valid)}. The run: ${percent(state.run_saved)}${last(state.run_valid)}.`);
  }

  describe(point) {
    const accuracy = point.data.yaxis === "y2";
    return `step ${say(point.x)}: ${point.data.called} ${accuracy ? `${(100 * point.y).toFixed(1)} %` : say(point.y)}`;
  }

  close() {
    this.plot.close();
  }
}
