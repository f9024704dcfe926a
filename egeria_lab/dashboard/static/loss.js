// Loss above, accuracy below, one step axis; a mark where a layer froze or thawed.

class LossView {
  constructor(panel, context) {
    this.context = context;
    this.plot = new Plot(panel.body, context, (point, points) => this.describe(point, points));
    this.plot.node.setAttribute("aria-label", "Loss and accuracy against the training step");
    this.legend = make("div", { class: "egl-legend egl-key" });
    panel.body.append(this.legend);
  }

  draw() {
    const { data, theme } = this.context, { steps, epochs } = data.tables;
    this.axis = sharedAxis(this.context);
    const kept = steps.drawn(steps.all());
    const ended = epochs.drawn(epochs.all());
    const train = theme.layers[0], valid = theme.dark ? "#E69F00" : "#D55E00";
    const thinLine = (name, axis) => this.line(steps, kept, name, axis, { color: train, width: 1 }, 0.3, "one step");
    const strong = (name, axis) => this.line(steps, kept, name, axis, { color: train, width: 2.2 }, 1, "training");
    const checked = (name, axis) => ({
      ...this.line(epochs, ended, name, axis, { color: valid, width: 1.5 }, 1, "validation"),
      mode: "lines+markers", marker: { symbol: "square", size: 6, color: valid },
    });
    const marks = this.marks();
    this.plot.draw([
      thinLine("loss", "y"), strong("loss_mean", "y"), checked("valid_loss", "y"),
      strong("accuracy_mean", "y2"), checked("valid_accuracy", "y2"), marks.trace,
    ], {
      xaxis: { ...this.axis.plotly, anchor: "y2" }, hovermode: "closest", uirevision: this.axis.chosen, shapes: marks.lines,
      yaxis: { domain: [0.46, 0.93], rangemode: "tozero", nticks: 5, title: { text: "loss", standoff: 10 } },
      yaxis2: { domain: [0, 0.38], tickformat: ".0%", nticks: 6, title: { text: "accuracy", standoff: 10 } },
      yaxis3: { domain: [0.95, 1], range: [0, 1], visible: false, fixedrange: true },
    });
    this.drawKey(train, valid);
  }

  line(table, rows, name, yaxis, line, opacity, called) {
    const column = table.column(name), x = [], y = [], steps = [];
    for (const row of rows) {
      if (Number.isNaN(column[row])) continue;
      x.push(this.axis.of(table.step[row]));
      y.push(column[row]);
      steps.push(table.step[row]);
    }
    return { type: "scatter", mode: "lines", x, y, steps, yaxis, line, opacity, hoverinfo: "none", called: `${called} ${name.replace("_mean", "").replace("valid_", "")}` };
  }

  marks() {
    const { lanes } = this.context.data.tables, { theme, layers } = this.context;
    const trace = { type: "scatter", mode: "markers", x: [], y: [], yaxis: "y3", hoverinfo: "none", tips: [], marker: { size: 9, color: [], symbol: [] } };
    const lines = [];
    for (let row = 0; row < lanes.rows; row++) {
      const kind = lanes.columns.kind[row], byHand = lanes.columns.by[row] === HAND;
      if (kind > 1) continue;
      const colour = kind === 1 ? theme.thaw : byHand ? theme.hand : theme.rule, x = this.axis.of(lanes.step[row]);
      trace.x.push(x);
      trace.y.push(0.5);
      trace.marker.color.push(colour);
      trace.marker.symbol.push(kind === 1 ? "circle-open" : byHand ? "diamond-open" : "diamond");
      trace.tips.push(`step ${say(lanes.step[row])}: ${layers[lanes.columns.layer[row]]?.name ?? ""} ${kind === 1 ? "thawed" : "frozen"} by ${byHand ? "hand" : "the rule"}\n${lanes.notes[row]}`);
      if (lines.length < 100) lines.push({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 0.95, layer: "below", line: { color: colour, width: 1, dash: "dot" } });
    }
    return { trace, lines };
  }

  drawKey(train, valid) {
    const wanted = `${train}${valid}`;
    if (wanted === this.keyDrawn) return;
    this.keyDrawn = wanted;
    const { theme } = this.context, entry = (glyph, colour, text) =>
      make("span", {}, make("span", { class: "egl-glyph", style: `color:${colour}` }, glyph), text);
    this.legend.replaceChildren(
      entry("━", train, "training (mean of 20 steps)"), entry("■", valid, "validation"),
      entry("◆", theme.rule, "frozen by the rule"), entry("◇", theme.hand, "by hand"), entry("○", theme.thaw, "thawed"),
    );
  }

  describe(point) {
    if (point.data.tips) return point.data.tips[point.pointIndex];
    const percent = point.data.yaxis === "y2";
    return `step ${say(point.data.steps[point.pointIndex])}: ${point.data.called} ${percent ? `${(100 * point.y).toFixed(1)} %` : say(point.y)}`;
  }

  close() {
    this.plot.close();
  }
}
