// The page's copy of the tables: numbers in typed arrays, thinned the same way as the kernel thins them.

const MOST_ROWS = { steps: 2048, plasticity: 16384, epochs: 2048, lanes: 4096, sieve: 1024, sparsity: 8192 };
const KEY_COLUMN = { steps: "loss", plasticity: "value", epochs: "valid_loss", sieve: "kept", sparsity: "churn" };
const LAYERED = ["plasticity", "sparsity"]; // a row for each layer: every layer is thinned by itself
const X_AXES = { // what a chart can have along its x axis: title, and the column of the table of steps
  steps: ["training step", null], epochs: ["passes over the training data (epochs)", "epoch"], samples: ["training samples seen", "samples"],
  FLOPs: ["training work done (FLOPs)", "flops"], seconds: ["elapsed time (seconds)", "elapsed_seconds"],
};
const MOST_STRETCHES = 200; // two rows each: at most 400 points a trace
const FLOOR = 1e-12; // logarithmic axes show nothing below

function stretchLength(lastStep, most) {
  let length = 1;
  while (Math.floor(lastStep / length) + 1 > most) length *= 2;
  return length;
}

// Rows (of `rows`, ascending) with the lowest and highest key in each power-of-two stretch of steps, and the ends.
// `lastStep` is the table's, not the layer's: all layers of a table are cut at the same steps.
function thin(step, key, rows, most, lastStep) {
  if (rows.length <= 4) return rows;
  const length = stretchLength(lastStep, most);
  const kept = [];
  let stretch = -1, low = -1, high = -1;
  const close = () => {
    if (low < 0) return;
    if (low === high) kept.push(low);
    else kept.push(Math.min(low, high), Math.max(low, high));
  };
  for (const row of rows) {
    const mine = Math.floor(step[row] / length), value = key[row];
    if (mine !== stretch) {
      close();
      stretch = mine;
      low = high = row;
      continue;
    }
    if (Number.isNaN(value)) continue;
    if (Number.isNaN(key[low]) || value < key[low]) low = row;
    if (Number.isNaN(key[high]) || value > key[high]) high = row;
  }
  close();
  const first = rows[0], last = rows[rows.length - 1];
  if (kept[0] !== first) kept.unshift(first);
  if (kept[kept.length - 1] !== last) kept.push(last);
  return kept;
}

class Table {
  constructor(name) {
    this.name = name;
    this.clear();
  }

  clear() {
    this.count = 0; // rows that the kernel's table had when we last heard
    this.rows = 0; // rows that we hold: fewer when thinned
    this.step = new Float64Array(256);
    this.columns = {};
    this.notes = [];
  }

  // Take one part of a frame. Returns false when rows are missing in between.
  take(part, step, values) {
    if (part.start > this.count) return false;
    if (part.start === 0) this.clear();
    const skip = this.count - part.start;
    if (skip >= part.rows && part.start > 0) return true;
    this.reserve(this.rows + part.rows - skip, part.columns);
    this.step.set(step.subarray(skip), this.rows);
    part.columns.forEach((name, i) => {
      this.columns[name].set(values.subarray(i * part.rows + skip, (i + 1) * part.rows), this.rows);
    });
    if (part.notes.length) this.notes.push(...part.notes.slice(skip));
    this.rows += part.rows - skip;
    this.count = part.count;
    if (this.rows > 3 * MOST_ROWS[this.name]) this.compact();
    return true;
  }

  reserve(rows, names) {
    let capacity = this.step.length;
    while (capacity < rows) capacity *= 2;
    const grow = (old, kind) => {
      if (old && old.length === capacity) return old;
      const fresh = new kind(capacity);
      if (old) fresh.set(old.subarray(0, this.rows));
      return fresh;
    };
    this.step = grow(this.step, Float64Array);
    for (const name of names) this.columns[name] = grow(this.columns[name], Float32Array);
  }

  get lastStep() {
    return this.rows ? this.step[this.rows - 1] : 0;
  }

  // The rows to draw as a line, at most two in each of `MOST_STRETCHES` stretches.
  drawn(rows) {
    return thin(this.step, this.column(KEY_COLUMN[this.name]), rows, MOST_STRETCHES, this.lastStep);
  }

  column(name) {
    return (this.columns[name] || new Float32Array(0)).subarray(0, this.rows);
  }

  // Row numbers, all or by layer, in order of step.
  all() {
    return Array.from({ length: this.rows }, (_, i) => i);
  }

  byLayer(numLayers) {
    const layer = this.column("layer"), groups = Array.from({ length: numLayers }, () => []);
    for (let row = 0; row < layer.length; row++) groups[layer[row]]?.push(row);
    return groups;
  }

  // Hold a bounded number of rows however long the run: what is dropped would not have been drawn.
  compact() {
    const most = MOST_ROWS[this.name];
    let kept;
    if (LAYERED.includes(this.name)) {
      const groups = new Map();
      this.column("layer").forEach((layer, row) => {
        if (!groups.has(layer)) groups.set(layer, []);
        groups.get(layer).push(row);
      });
      const each = Math.max(1, Math.floor(most / (2 * groups.size)));
      kept = [...groups.values()].flatMap((rows) => thin(this.step, this.columns[KEY_COLUMN[this.name]], rows, each, this.lastStep));
      kept.sort((a, b) => a - b);
    } else if (this.name === "lanes") {
      kept = this.all().slice(-most);
    } else {
      kept = thin(this.step, this.columns[KEY_COLUMN[this.name]], this.all(), most / 2, this.lastStep);
    }
    const pick = (from) => kept.forEach((row, i) => { from[i] = from[row]; });
    pick(this.step);
    Object.values(this.columns).forEach(pick);
    if (this.notes.length) this.notes = kept.map((row) => this.notes[row]);
    this.rows = kept.length;
  }
}

class Data {
  constructor() {
    this.tables = Object.fromEntries(Object.keys(MOST_ROWS).map((name) => [name, new Table(name)]));
  }

  // Returns the names of the tables that changed, or null when rows are missing.
  take(parts, buffers) {
    const changed = [];
    let complete = true;
    parts.forEach((part, i) => {
      const step = new Float64Array(buffers[2 * i]), values = new Float32Array(buffers[2 * i + 1]);
      if (this.tables[part.table]?.take(part, step, values)) changed.push(part.table);
      else complete = false;
    });
    return complete ? changed : null;
  }

  get lastStep() {
    const { steps, plasticity } = this.tables;
    return Math.max(steps.lastStep, plasticity.lastStep);
  }

  // Where steps lie on an x axis: a function of the step, straight between the steps that we hold.
  placing(axis) {
    const name = X_AXES[axis]?.[1];
    if (!name) return (step) => step;
    const { steps } = this.tables, column = steps.column(name), at = [0], x = [0];
    for (let row = 0; row < column.length; row++) {
      if (Number.isNaN(column[row])) continue;
      at.push(steps.step[row]);
      x.push(column[row]);
    }
    return (step) => {
      let low = 0, high = at.length - 1;
      if (step >= at[high]) return x[high];
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (at[middle] <= step) low = middle;
        else high = middle;
      }
      return x[low] + (x[high] - x[low]) * (step - at[low]) / (at[high] - at[low]);
    };
  }
}
