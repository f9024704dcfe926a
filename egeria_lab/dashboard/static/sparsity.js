// Sparsity: the density of each layer above, what each mask update exchanged below; beyond twelve layers as pictures.

const DASHES = ["solid", "9px 9px", "3px 6px", "2px 12px"];

class SparsityView {
  constructor(panel, context) {
    this.context = context;
    this.plot = new Plot(panel.body, context, (point) => this.describe(point));
    this.plot.node.setAttribute("aria-label", "Density of each layer, and share of its weights exchanged, against the training step");
    this.legend = make("div", { class: "egl-legend egl-key" });
    panel.body.append(this.legend);
  }

  get applies() {
    return this.context.data.tables.sparsity.rows > 0;
  }

  draw() {
    const table = this.context.data.tables.sparsity, groups = table.byLayer(this.context.layers.length);
    this.axis = sharedAxis(this.context);
    this.masked = groups.map((_, layer) => layer).filter((layer) => groups[layer].length);
    const dense = this.masked.length > MOST_LINES;
    this.plot.node.parentNode.classList.toggle("egl-dense", dense);
    this.legend.hidden = dense;
    if (dense) this.drawPictures(table, groups);
    else this.drawLines(table, groups);
  }

  drawLines(table, groups) {
    const { theme, data } = this.context, traces = [];
    this.masked.forEach((layer) => {
      const colour = layerColour(theme, layer), rows = table.drawn(groups[layer]);
      const held = [...rows, rows.at(-1)], x = held.map((row, i) => this.axis.of(i < rows.length ? table.step[row] : data.lastStep));
      traces.push({
        type: "scatter", mode: "lines", x, y: held.map((row) => table.columns.density[row]), rows: held, hoverinfo: "none",
        line: { color: colour, width: 2.2, shape: "hv", dash: DASHES[layer % DASHES.length] }, // equal densities lie on each other
      });
      const updates = rows.filter((row) => !Number.isNaN(table.columns.churn[row]));
      traces.push({
        type: "scatter", mode: "lines+markers", x: updates.map((row) => this.axis.of(table.step[row])), y: updates.map((row) => table.columns.churn[row]),
        rows: updates, yaxis: "y2", hoverinfo: "none", line: { color: colour, width: 1 },
        marker: { size: 6, color: colour, symbol: SHAPES[layer % SHAPES.length], maxdisplayed: 40 },
      });
    });
    this.plot.draw(traces, {
      xaxis: { ...this.axis.plotly, anchor: "y2" }, uirevision: this.axis.chosen,
      yaxis: { domain: [0.5, 1], tickformat: ".0%", rangemode: "tozero", nticks: 5, title: { text: "live weights", standoff: 10 } },
      yaxis2: { domain: [0, 0.42], tickformat: ".1%", rangemode: "tozero", nticks: 4, title: { text: "exchanged", standoff: 10 } },
    });
    const { layers } = this.context, wanted = JSON.stringify([this.masked, theme.dark]);
    if (wanted === this.legendDrawn) return;
    this.legendDrawn = wanted;
    this.legend.replaceChildren(...this.masked.map((layer) => make("span", {},
      make("span", { class: "egl-glyph", style: `color:${layerColour(theme, layer)}` }, GLYPHS[layer % GLYPHS.length]), layers[layer]?.name ?? "")));
  }

  // Rows: layers with masks; columns: updates. The newest row of each stretch of steps stands for it.
  drawPictures(table, groups) {
    const { layers } = this.context, most = Math.min(MOST_COLUMNS, Math.floor(MOST_ROWS.sparsity / (2 * this.masked.length)));
    const length = stretchLength(table.lastStep, most), place = new Map();
    const columns = [...new Set(Array.from(table.step.subarray(0, table.rows), (step) => Math.floor(step / length)))].sort((a, b) => a - b);
    columns.forEach((column, i) => place.set(column, i));
    this.cells = this.masked.map((layer) => {
      const cells = new Array(columns.length).fill(-1);
      for (const row of groups[layer]) cells[place.get(Math.floor(table.step[row] / length))] = row;
      return cells;
    });
    const first = new Map(); // a column reaches from its first update to the next column's: a density holds until then
    table.step.subarray(0, table.rows).forEach((step) => {
      const column = Math.floor(step / length);
      if (!first.has(column)) first.set(column, step);
    });
    const end = Math.max(this.context.data.lastStep, first.get(columns.at(-1)) + 1), edges = [...columns.map((column) => first.get(column)), end].map(this.axis.of);
    const every = Math.ceil(this.masked.length / 14), ticks = this.masked.map((_, i) => i).filter((i) => i % every === 0);
    const names = ticks.map((i) => layers[this.masked[i]]?.name ?? ""), widest = Math.max(4, ...names.map((name) => name.length));
    const map = (name, yaxis, colorscale, title, y, hold) => ({
      type: "heatmap", x: edges, y: this.masked.map((_, i) => i), yaxis, hoverinfo: "none", colorscale,
      hoverongaps: false, counted: this.cells.flat().filter((row) => row >= 0).length,
      z: this.cells.map((cells) => {
        let before = null;
        return cells.map((row) => {
          const value = row < 0 || Number.isNaN(table.columns[name][row]) ? null : table.columns[name][row];
          if (value !== null) before = value;
          return hold ? before : value; // a density holds until the next update
        });
      }),
      colorbar: { thickness: 10, outlinewidth: 0, nticks: 3, tickfont: { size: 11 }, tickformat: ".0%", len: 0.48, y, title: { text: title, side: "top", font: { size: 11 } } },
    });
    const side = { autorange: "reversed", tickvals: ticks, ticktext: names, showgrid: false };
    this.plot.draw([map("density", "y", "Cividis", "live", 0.78, true), map("churn", "y2", "Viridis", "exchanged", 0.22, false)], {
      xaxis: { ...this.axis.plotly, anchor: "y2", showgrid: false }, yaxis: { ...side, domain: [0.54, 1] }, yaxis2: { ...side, domain: [0, 0.46] },
      margin: { l: Math.min(120, 14 + 6.6 * widest), r: 8, t: 10, b: 38 }, uirevision: this.axis.chosen,
    });
  }

  describe(point) {
    const picture = Array.isArray(point.pointIndex);
    const row = picture ? this.cells?.[point.pointIndex[0]]?.[point.pointIndex[1]] : point.data.rows?.[point.pointIndex];
    if (row === undefined || row < 0) return "";
    const table = this.context.data.tables.sparsity, churn = table.columns.churn[row];
    const name = this.context.layers[table.columns.layer[row]]?.name ?? "", percent = (share) => `${(100 * share).toFixed(1)} %`;
    return `${name}, from step ${say(table.step[row])}: ${percent(table.columns.density[row])} of its weights live`
      + (Number.isNaN(churn) ? "" : `\n${percent(churn)} of them exchanged by this update`);
  }

  close() {
    this.plot.close();
  }
}
