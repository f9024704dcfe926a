// Plasticity: a line a layer, or beyond twelve layers a picture with a row a layer.

const MOST_LINES = 12;
const MOST_COLUMNS = 128;
const TOLERANCE_TICKS = { tickvals: [-2, -1, 0, 1, 2], ticktext: ["1/100", "1/10", "tolerance", "10 ×", "100 ×"] };
const VERDICTS = ["warming up", "moving", "stable", "freeze", "blocked", "frozen"];

class PlasticityView {
  constructor(panel, context) {
    this.context = context;
    panel.tools.append(this.toggle());
    this.plot = new Plot(panel.body, context, (point) => this.describe(point));
    this.plot.node.setAttribute("aria-label", "Plasticity of each layer against the training step");
    this.legend = make("div", { class: "egl-legend", role: "group", "aria-label": "Show or hide layers" });
    panel.body.append(this.legend);
  }

  toggle() {
    const group = make("div", { class: "egl-toggle", role: "group", "aria-label": "What the panel shows" });
    for (const mode of ["plasticity", "slope vs tolerance"]) {
      const button = make("button", {
        type: "button", "aria-pressed": String(mode === this.mode),
        title: mode === "plasticity"
          ? "Distance between each layer's output and the reference's: faint as read, strong smoothed"
          : "The trend of the smoothed line (solid) against its tolerance (dashed): below it, the layer is stable",
        onclick: () => {
          this.context.choices.mode = mode;
          for (const other of group.children) other.setAttribute("aria-pressed", String(other === button));
          this.context.redraw("plasticity");
        },
      }, mode);
      group.append(button);
    }
    return group;
  }

  get mode() {
    return this.context.choices.mode;
  }

  get hiddenLayers() {
    return this.context.choices.hiddenLayers;
  }

  get dense() {
    return this.context.layers.length > MOST_LINES;
  }

  draw() {
    this.legend.hidden = this.dense;
    this.plot.node.parentNode.classList.toggle("egl-dense", this.dense);
    if (this.dense) this.drawPicture();
    else this.drawLines();
  }

  colour(layer) {
    return layerColour(this.context.theme, layer);
  }

  drawLines() {
    const table = this.context.data.tables.plasticity, groups = table.byLayer(this.context.layers.length);
    const slopes = this.mode !== "plasticity";
    this.axis = sharedAxis(this.context);
    const traces = [], ends = { x: [], y: [], colour: [], shape: [], row: [] };
    this.span = [Infinity, 0];
    groups.forEach((rows, layer) => {
      if (this.hiddenLayers.has(layer) || !rows.length) return;
      const kept = table.drawn(rows), colour = this.colour(layer);
      if (slopes) {
        traces.push(this.line(table, kept, "tolerance", { color: colour, width: 1.5, dash: "dash" }, 0.9));
        traces.push(this.line(table, kept, "slope", { color: colour, width: 2 }, 1));
      } else {
        traces.push(this.line(table, kept, "value", { color: colour, width: 1 }, 0.35));
        traces.push(this.line(table, kept, "smoothed", { color: colour, width: 2.5 }, 1));
      }
      this.mark(ends, traces[traces.length - 1], layer, colour);
    });
    traces.push({
      type: "scatter", mode: "markers", x: ends.x, y: ends.y, rows: ends.row, hoverinfo: "none",
      marker: { size: 9, color: ends.colour, symbol: ends.shape, line: { width: 1.5, color: ends.colour } },
    });
    const [low, high] = this.span;
    this.plot.draw(traces, {
      xaxis: this.axis.plotly,
      yaxis: {
        type: "log", dtick: 1, exponentformat: "power", tickfont: { size: 10 }, // powers are drawn a quarter larger
        range: decades(high ? low : 1e-4, high || 1),
        title: { text: slopes ? "|slope| per reading" : "plasticity", standoff: 10 },
      },
      uirevision: this.mode + this.axis.chosen,
    });
    this.drawLegend();
  }

  // One column over some rows; a new reference starts a new line. Against a fresh reference the distance is zero:
  // such a start has no place on a logarithmic axis and is left out, unless nothing else follows.
  line(table, rows, name, line, opacity) {
    const column = table.column(name), generation = table.column("generation"), x = [], y = [], source = [];
    const known = rows.filter((row) => !Number.isNaN(column[row]));
    const add = (step, value, row) => { x.push(this.axis.of(step)); y.push(value); source.push(row); };
    known.forEach((row, i) => {
      const next = known[i + 1], fresh = i === 0 || generation[row] !== generation[known[i - 1]];
      if (fresh && i > 0) add(table.step[row], null, -1);
      if (fresh && column[row] === 0 && next !== undefined && generation[next] === generation[row]) return;
      const value = Math.max(FLOOR, Math.abs(column[row]));
      this.span = [Math.min(this.span[0], value), Math.max(this.span[1], value)];
      add(table.step[row], value, row);
    });
    return { type: "scatter", mode: "lines", x, y, rows: source, line, opacity, hoverinfo: "none" };
  }

  mark(ends, trace, layer, colour) {
    const last = trace.x.length - 1;
    if (last < 0) return;
    const frozen = this.context.layers[layer]?.state === "frozen";
    ends.x.push(trace.x[last]);
    ends.y.push(trace.y[last]);
    ends.row.push(trace.rows[last]);
    ends.colour.push(colour);
    ends.shape.push(SHAPES[layer % SHAPES.length] + (frozen ? "-open" : ""));
  }

  drawLegend() {
    const { layers } = this.context;
    const wanted = JSON.stringify([layers.map((row) => [row.name, row.state]), [...this.hiddenLayers], this.context.theme.dark]);
    if (wanted === this.legendDrawn) return;
    this.legendDrawn = wanted;
    this.legend.replaceChildren(...layers.map((row, layer) => {
      const shown = !this.hiddenLayers.has(layer);
      const glyph = make("span", { class: "egl-glyph", style: `color:${this.colour(layer)}` }, GLYPHS[layer % GLYPHS.length]);
      return make("button", {
        type: "button", "aria-pressed": String(shown), title: `${shown ? "Hide" : "Show"} ${row.name}`,
        onclick: () => {
          if (shown) this.hiddenLayers.add(layer);
          else this.hiddenLayers.delete(layer);
          this.context.redraw("plasticity");
        },
      }, glyph, row.name, row.state === "frozen" ? make("em", {}, "frozen") : null);
    }));
  }

  // Rows: layers; columns: stretches of steps; colour: the highest value there (or its slope against its tolerance).
  drawPicture() {
    const { layers, theme } = this.context, table = this.context.data.tables.plasticity, { step } = table;
    const axis = sharedAxis(this.context);
    const most = Math.min(MOST_COLUMNS, Math.floor(MOST_ROWS.plasticity / (2 * layers.length)));
    const length = stretchLength(table.lastStep, most), slopes = this.mode !== "plasticity";
    const value = table.column("value"), slope = table.column("slope"), tolerance = table.column("tolerance");
    const columns = [...new Set(this.stretches(table, length))].sort((a, b) => a - b);
    const place = new Map(columns.map((column, i) => [column, i]));
    this.cells = layers.map(() => new Array(columns.length).fill(-1));
    table.byLayer(layers.length).forEach((rows, layer) => rows.forEach((row) => {
      const column = place.get(Math.floor(step[row] / length)), before = this.cells[layer][column];
      if (before < 0 || value[row] > value[before]) this.cells[layer][column] = row;
    }));
    const log = (x) => Math.log10(Math.max(FLOOR, Math.abs(x)));
    const shade = (row) => (row < 0 ? null : slopes ? log(slope[row]) - log(tolerance[row]) : log(value[row]));
    const z = this.cells.map((cells) => cells.map((row) => {
      const drawn = shade(row);
      return Number.isNaN(drawn) ? null : drawn;
    }));
    const every = Math.ceil(layers.length / 14), ticks = layers.map((_, i) => i).filter((i) => i % every === 0);
    const names = ticks.map((i) => layers[i].name), widest = Math.max(4, ...names.map((name) => name.length));
    this.plot.draw([{
      type: "heatmap", x: columns.map((column) => axis.of((column + 0.5) * length)), y: layers.map((_, i) => i), z, hoverinfo: "none",
      counted: this.cells.flat().filter((row) => row >= 0).length, hoverongaps: false, xgap: 0, ygap: layers.length <= 40 ? 1 : 0,
      ...(slopes ? this.aroundTolerance(theme) : { colorscale: "Cividis" }),
      colorbar: {
        thickness: 10, outlinewidth: 0, nticks: 4, tickfont: { size: 11 },
        ...(slopes ? TOLERANCE_TICKS : { dtick: 1, tickprefix: "10<sup>", ticksuffix: "</sup>" }),
        title: { text: slopes ? "|slope|" : "plasticity", side: "top", font: { size: 11 } },
      },
    }], {
      xaxis: { ...axis.plotly, showgrid: false },
      yaxis: { autorange: "reversed", tickvals: ticks, ticktext: names, showgrid: false },
      margin: { l: Math.min(120, 14 + 6.6 * widest), r: 8, t: 10, b: 38 }, uirevision: this.mode + axis.chosen,
    });
  }

  stretches(table, length) {
    return Array.from(table.step.subarray(0, table.rows), (step) => Math.floor(step / length));
  }

  aroundTolerance(theme) {
    const middle = theme.dark ? "#333333" : "#f2f2f2";
    return { zmin: -2, zmax: 2, colorscale: [[0, "#0072B2"], [0.5, middle], [1, "#E69F00"]] };
  }

  describe(point) {
    const row = this.dense ? this.cells?.[point.pointIndex[0]]?.[point.pointIndex[1]] : point.data.rows?.[point.pointIndex];
    if (row === undefined || row < 0) return "";
    const table = this.context.data.tables.plasticity, at = (name) => table.column(name)[row];
    const name = this.context.layers[at("layer")]?.name ?? "";
    return [
      `${name}, step ${say(table.step[row])}: ${VERDICTS[at("verdict")] ?? ""}`,
      `plasticity ${say(at("value"))}, smoothed ${say(at("smoothed"))}`,
      `slope ${say(at("slope"))}, tolerance ${say(at("tolerance"))}, stable for ${say(at("stable"))} readings`,
    ].join("\n");
  }

  close() {
    this.plot.close();
  }
}
