// One Plotly picture: sized to its box, themed, redrawn only when asked, with our own hover line.

const CONFIG = { displayModeBar: false, responsive: false, doubleClick: "reset", scrollZoom: false };

class Plot {
  constructor(box, context, describe) {
    this.context = context;
    this.describe = describe; // (plotly point, all points) => text of the hover line
    this.node = make("div", { class: "egl-plot", role: "figure" });
    this.wait = make("div", { class: "egl-wait" }, "loading the chart library …");
    this.node.append(this.wait);
    box.append(this.node);
  }

  layout(extra) {
    const { theme } = this.context;
    const axis = {
      gridcolor: theme.grid, linecolor: theme.grid, zeroline: false, nticks: 4, tickfont: { size: 12 },
      tickcolor: theme.grid, automargin: false, fixedrange: false, separatethousands: true,
    };
    const layout = {
      width: this.node.clientWidth, height: this.node.clientHeight,
      margin: { l: 64, r: 16, t: 10, b: 38 }, showlegend: false, hovermode: "closest", dragmode: "zoom",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", uirevision: "kept",
      font: { family: theme.font, size: 12, color: theme.ink }, ...extra,
    };
    for (const name of Object.keys(layout)) {
      if (/^[xy]axis\d*$/.test(name)) layout[name] = { ...axis, ...layout[name] };
    }
    return layout;
  }

  draw(traces, extra) {
    const { Plotly } = this.context;
    if (!Plotly || this.node.clientWidth < 40) return;
    this.wait.remove();
    Plotly.react(this.node, traces, this.layout(extra), CONFIG);
    if (!this.listening) this.listen();
    this.node.dataset.points = traces.reduce((sum, trace) => sum + (trace.counted ?? trace.x?.length ?? 0), 0);
  }

  listen() {
    this.listening = true;
    this.node.on("plotly_hover", ({ points, event }) => {
      const text = this.describe(points[0], points);
      if (text && event) this.context.tip.show(text, event.clientX, event.clientY);
    });
    this.node.on("plotly_unhover", () => this.context.tip.hide());
  }

  close() {
    this.context.Plotly?.purge(this.node);
  }
}

// The x axis that all panels share, from the first step to the last one seen: where a step lies, and for Plotly.
function sharedAxis(context) {
  const chosen = X_AXES[context.choices.x] ? context.choices.x : "steps", of = context.data.placing(chosen);
  const last = 1.01 * of(context.data.lastStep) || 10, end = chosen === "steps" ? Math.max(10, last) : last;
  const large = chosen === "FLOPs" ? { exponentformat: "SI" } : {};
  return { of, end, chosen, plotly: { range: [0, end], title: { text: X_AXES[chosen][0], standoff: 6 }, ...large } };
}

// A number on an axis: 1,200, 3.5 G.
function sayShort(value) {
  const prefixes = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"]];
  const found = prefixes.find(([size]) => Math.abs(value) >= size);
  return found ? `${Number((value / found[0]).toPrecision(3))} ${found[1]}` : say(value);
}

// Round values for ticks, at most five of them.
function roundTicks(end) {
  const rough = end / 4, power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  return Array.from({ length: Math.floor(end / unit) + 1 }, (_, i) => Number((i * unit).toPrecision(12)));
}

const layerColour = (theme, layer) => theme.layers[layer % theme.layers.length];

const MOST_DECADES = 7;

// Whole decades around some positive values, so that the axis stands still while the values move.
function decades(low, high) {
  const from = Math.floor(Math.log10(Math.max(FLOOR, low)));
  const to = Math.ceil(Math.log10(Math.max(FLOOR, high)));
  return [Math.max(from, to - MOST_DECADES), Math.max(to, from + 1)];
}
