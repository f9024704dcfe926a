// Savings: theory and measurement side by side, as bars and numbers, with the reason; and what watching costs.

class SavingsView {
  constructor(panel, context) {
    this.context = context;
    this.box = make("div", { class: "egl-saving-list" });
    this.cost = make("p", { class: "egl-cost", title: "Share of the training time; both are paid, not saved" });
    panel.body.append(this.box, this.cost);
  }

  draw() {
    const { rows = [], watching = "" } = this.context.model.get("ledger") || {};
    const wanted = JSON.stringify(rows);
    if (wanted !== this.drawn) {
      this.drawn = wanted;
      this.box.replaceChildren(...rows.map((row) => this.row(row)));
      this.wide = rows.length > 3; // other techniques beside freezing: side by side
      this.context.arrange();
    }
    setText(this.cost, watching ? `Cost of watching: ${watching}` : "");
  }

  row({ quantity, theoretical, measured, absolute, why, unmeasured }) {
    return make("section", { class: "egl-saving" },
      make("h4", {}, quantity, make("small", {}, absolute)),
      this.bar("theoretical", theoretical), this.bar("measured", measured, unmeasured),
      why ? make("p", { class: "egl-why" }, why) : null);
  }

  bar(kind, share, unmeasured = "no estimate") {
    const known = typeof share === "number", loss = known && share < 0;
    const width = known ? Math.min(100, Math.abs(100 * share)) : 0;
    const words = known ? `${(100 * share).toFixed(1)} %` : unmeasured;
    const fill = make("span", { class: `egl-fill egl-${kind}${loss ? " egl-loss" : ""}${width ? "" : " egl-none"}`, style: `width:${width}%` });
    return make("div", { class: "egl-saving-bar" }, make("span", { class: "egl-saving-name" }, kind),
      make("span", { class: "egl-track", "aria-hidden": "true" }, fill),
      make(known ? "b" : "span", { class: known ? null : "egl-saving-name" }, words));
  }

  close() {}
}
