// The freeze timeline: a lane a layer, its buttons beside it. Plain SVG: sixty lanes cost less than one chart.

const FROZEN = 0, THAWED = 1, PINNED = 2, UNPINNED = 3, REFRESHED = 4, MOVED = 5, SETTLING = 6, SETTLING_ENDED = 7;

// The upright lines and the numbers of an x axis in plain SVG.
const gridLines = (place, end, height) =>
  roundTicks(end).map((x) => `<line class="egl-grid-line" x1="${place(x)}" x2="${place(x)}" y1="0" y2="${height}"/>`).join("");

function axisLabels(place, end, width, y) {
  const anchor = (x) => (x > width - 24 ? "end" : x < 12 ? "start" : "middle");
  return roundTicks(end).map((x) => `<text x="${place(x)}" y="${y}" text-anchor="${anchor(place(x))}">${sayShort(x)}</text>`).join("");
}

const tip = (text) => `data-tip="${escapeHtml(text)}"`;

class TimelineView {
  constructor(panel, context) {
    this.context = context;
    this.labels = make("div", { class: "egl-lane-labels" });
    this.lanes = make("div", { class: "egl-lanes" });
    this.scroller = make("div", { class: "egl-lane-scroller" }, this.labels, this.lanes);
    this.axis = make("div", { class: "egl-lane-axis" }, make("span", {}, "references, settings"), make("div"));
    this.key = make("div", { class: "egl-legend egl-key" });
    panel.body.append(this.scroller, this.axis, this.key);
    this.labels.addEventListener("click", (event) => this.press(event));
    this.rows = [];
  }

  press(event) {
    const button = event.target.closest("button[data-layer]");
    if (!button) return;
    const { action, layer } = button.dataset;
    this.context.request({ do: action, layer }, `layer:${layer}`);
  }

  get rowHeight() {
    return Math.max(22, Math.min(44, Math.floor(290 / this.context.layers.length)));
  }

  draw() {
    const { layers } = this.context;
    if (this.rows.length !== layers.length) this.build();
    const story = this.story();
    layers.forEach((row, i) => this.label(this.rows[i], row, story.pinned[i]));
    const width = Math.max(80, this.scroller.clientWidth - this.labels.offsetWidth);
    const axis = sharedAxis(this.context), place = (x) => (x / axis.end) * (width - 12) + 4;
    const at = (step) => place(axis.of(step));
    const height = this.rowHeight * layers.length;
    this.lanes.innerHTML =
      `<svg width="${width}" height="${height}" role="figure" aria-label="When each layer was trained, frozen or pinned">` +
      `${this.hatch()}${this.gridLines(place, axis.end, height)}${this.bars(story, at)}</svg>`;
    this.drawAxis(story, at, place, axis.end, width);
    this.drawKey(story.marks.some((mark) => mark.kind === SETTLING));
  }

  build() {
    const { layers } = this.context;
    this.rows = layers.map((row) => {
      const button = () => make("button", { type: "button", class: "egl-mini", "data-layer": row.name });
      const parts = {
        name: make("span", { class: "egl-lane-name" }), pending: make("span", { class: "egl-pending", hidden: true }, "pending"),
        freeze: button(), pin: button(),
      };
      const tall = this.rowHeight >= 36 ? " egl-tall" : "";  // few layers: room for the title below the name
      parts.row = make("div", { class: `egl-lane-label${tall}`, style: `height:${this.rowHeight}px` }, parts.name, parts.pending, parts.freeze, parts.pin);
      return parts;
    });
    this.labels.replaceChildren(...this.rows.map((parts) => parts.row));
  }

  label(parts, row, pinned) {
    const frozen = row.state === "frozen";
    const title = row.title && row.title !== row.name ? `${row.name} ${row.title}` : row.name;
    if (parts.titled !== title) {
      parts.titled = title;
      parts.name.replaceChildren(make("b", {}, row.name), row.title && row.title !== row.name ? make("span", {}, ` ${row.title}`) : "");
    }
    parts.name.dataset.tip = `${title}, ${row.state}${row.since === null ? "" : ` since step ${say(row.since)}`}`
      + `${row.reason ? `\n${row.reason}` : ""}\n${say(row.parameters)} parameters`;
    this.button(parts.freeze, frozen ? "thaw" : "freeze", row, frozen
      ? "trains it again, exactly where it was left, from the next step on"
      : "stops training it from the next step on");
    this.button(parts.pin, pinned ? "unpin" : "pin", row, pinned
      ? "the rule may freeze it again, from the next step on"
      : "no rule may freeze it, from the next step on");
    parts.pending.hidden = !this.context.isPending(`layer:${row.name}`);
  }

  button(node, action, row, effect) {
    const word = action[0].toUpperCase() + action.slice(1);
    setText(node, word);
    if (node.dataset.action !== action) {
      node.dataset.action = action;
      node.setAttribute("aria-label", `${word} ${row.name}`);
      node.title = `${word} ${row.name}: ${effect}`;
    }
    node.disabled = this.context.offline;
  }

  hatch() {
    const { theme } = this.context;
    return `<defs><pattern id="egl-hatch-${this.context.id}" width="7" height="7" patternTransform="rotate(45)" patternUnits="userSpaceOnUse">` +
      `<rect width="7" height="7" fill="${theme.hand}" fill-opacity="0.3"/><rect width="3" height="7" fill="${theme.hand}"/></pattern></defs>`;
  }

  // Spans by layer and single moments, from the events in order.
  story() {
    const { lanes } = this.context.data.tables, { layers, data } = this.context;
    const open = layers.map(() => ({})), spans = [], marks = [];
    const close = (span, step) => span && spans.push({ ...span, to: step });
    for (let row = 0; row < lanes.rows; row++) {
      const layer = lanes.columns.layer[row], kind = lanes.columns.kind[row], step = lanes.step[row];
      const byHand = lanes.columns.by[row] === HAND, note = lanes.notes[row];
      marks.push({ layer, kind, step, byHand, note });
      const state = open[layer];
      if (!state) continue;
      if (kind === FROZEN || kind === SETTLING_ENDED) {
        close(state.settling, step);
        state.settling = null;
      }
      if (kind === SETTLING) state.settling = { layer, from: step, settling: true, note };
      if (kind === FROZEN) {
        close(state.frozen, step);
        state.frozen = { layer, from: step, frozen: true, byHand, note };
      } else if (kind === PINNED) state.pinned = state.pinned || { layer, from: step, frozen: false, byHand, note };
      else if (kind === THAWED || kind === UNPINNED) {
        const which = kind === THAWED ? "frozen" : "pinned";
        close(state[which], step);
        state[which] = null;
      }
    }
    open.forEach((state) => [state.settling, state.frozen, state.pinned].forEach((span) => close(span, data.lastStep)));
    return { spans, marks, pinned: open.map((state, i) => Boolean(state.pinned) || layers[i].state === "pinned") };
  }

  bars({ spans, marks }, at) {
    const { layers, theme, data } = this.context, height = this.rowHeight;
    const thick = Math.min(16, height - 8), middle = (layer) => (layer + 0.5) * height, out = [];
    layers.forEach((row, i) => {
      out.push(`<rect class="egl-active" x="${at(0)}" y="${middle(i) - 2}" width="${Math.max(0, at(data.lastStep) - at(0))}" height="4" rx="2" ${tip(`${row.name}: trained`)}/>`);
    });
    for (const span of spans) {
      const x = at(span.from), width = Math.max(3, at(span.to) - x), y = middle(span.layer);
      const stretch = `steps ${say(span.from)} to ${say(span.to)}`, name = layers[span.layer].name;
      if (span.frozen) {
        const who = span.byHand ? "by hand" : "by the rule";
        out.push(`<rect class="egl-bar" data-kind="${span.byHand ? "hand" : "rule"}" data-lane="${escapeHtml(name)}" x="${x}" y="${y - thick / 2}" width="${width}" height="${thick}" rx="3" ` +
          `fill="${span.byHand ? `url(#egl-hatch-${this.context.id})` : theme.rule}" stroke="${span.byHand ? theme.hand : theme.rule}" ${tip(`${name}: frozen ${who}, ${stretch}\n${span.note}`)}/>`);
      } else {
        const look = span.settling ? `class="egl-settles" y="${y - thick / 4}" height="${thick / 2}" fill="${theme.rule}" fill-opacity="0.4"` : `y="${y + thick / 2}" height="3" fill="${theme.pin}"`;
        const words = span.settling ? `${name}: settles, trained less and less, ${stretch}\n${span.note}` : `${name}: pinned, ${stretch}`;
        out.push(`<rect x="${x}" width="${width}" ${look} ${tip(words)}/>`);
      }
    }
    for (const mark of marks) {
      if (mark.kind < REFRESHED && mark.layer >= 0) out.push(this.markAt(mark, at(mark.step), middle(mark.layer)));
    }
    return out.join("");
  }

  markAt({ layer, kind, step, byHand, note }, x, y) {
    const { theme, layers } = this.context, name = layers[layer]?.name ?? "", by = byHand ? "hand" : "the rule";
    const diamond = (size) => `M${x} ${y - size}L${x + size} ${y}L${x} ${y + size}L${x - size} ${y}Z`;
    const shape = {
      [FROZEN]: `<path d="${diamond(7)}" fill="${byHand ? theme.paper : theme.rule}" stroke="${byHand ? theme.hand : theme.paper}"`,
      [THAWED]: `<circle cx="${x}" cy="${y}" r="5.5" fill="${theme.paper}" stroke="${theme.thaw}"`,
      [PINNED]: `<rect x="${x - 4.5}" y="${y - 4.5}" width="9" height="9" fill="${theme.pin}" stroke="${theme.paper}"`,
      [UNPINNED]: `<rect x="${x - 4.5}" y="${y - 4.5}" width="9" height="9" fill="${theme.paper}" stroke="${theme.pin}"`,
      [REFRESHED]: `<path d="M${x} ${y - 4}L${x + 4} ${y + 4}L${x - 4} ${y + 4}Z" fill="${theme.muted}" stroke="none"`,
    }[kind] ?? `<path d="${diamond(4.5)}" fill="${theme.paper}" stroke="${theme.hand}"`;
    const words = { [FROZEN]: `${name} frozen by ${by}`, [THAWED]: `${name} thawed by ${by}`, [PINNED]: `${name} pinned`, [UNPINNED]: `${name} unpinned` }[kind];
    return `${shape} stroke-width="2" data-step="${step}" ${tip(`step ${say(step)}: ${words ? `${words}\n${note}` : note}`)}/>`;
  }

  gridLines(place, end, height) {
    return gridLines(place, end, height);
  }

  // Below the lanes, always in sight: what concerns the whole run, and the steps.
  drawAxis({ marks }, at, place, end, width) {
    const labels = axisLabels(place, end, width, 34);
    const moments = marks.filter((mark) => mark.kind === REFRESHED || mark.kind === MOVED).map((mark) => this.markAt(mark, at(mark.step), 10));
    this.axis.firstChild.style.width = `${this.labels.offsetWidth}px`;
    this.axis.lastChild.innerHTML = `<svg width="${width}" height="40">${this.gridLines(place, end, 20)}${moments.join("")}${labels}</svg>`;
  }

  drawKey(settles) {
    const { theme } = this.context;
    if (this.keyTheme === theme && this.keySettles === settles) return;
    this.keyTheme = theme;
    this.keySettles = settles;
    const entry = (glyph, colour, text) => make("span", {}, make("span", { class: "egl-glyph", style: `color:${colour}` }, glyph), text);
    this.key.replaceChildren(
      entry("◆", theme.rule, "frozen by the rule"), entry("◇", theme.hand, "frozen by hand (hatched)"), entry("○", theme.thaw, "thawed"),
      entry("■", theme.pin, "pinned"), entry("▲", theme.muted, "new reference"), entry("◇", theme.hand, "setting moved"),
      ...(settles ? [entry("▬", theme.rule, "settling")] : []),
    );
  }

  close() {}
}
