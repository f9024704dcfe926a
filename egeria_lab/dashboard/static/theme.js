// Colours, numbers in words, and small DOM helpers that every panel uses.

const LIGHT = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333"];
const DARK = ["#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#F0E442", "#DDDDDD"];
const SHAPES = ["circle", "square", "diamond", "triangle-up", "cross", "star", "pentagon", "hexagon", "x"];
const GLYPHS = ["●", "■", "◆", "▲", "✚", "★", "⬟", "⬢", "✖"];
const HAND = 1;

function readTheme(root) {
  const style = getComputedStyle(root), value = (name) => style.getPropertyValue(name).trim();
  const probe = (name) => {
    root.style.setProperty("--egl-probe", `var(${name})`);
    const pixel = root.querySelector(".egl-probe");
    return getComputedStyle(pixel).color;
  };
  const [r, g, b] = (probe("--egl-paper").match(/[\d.]+/g) || [255, 255, 255]).map(Number);
  const dark = 0.299 * r + 0.587 * g + 0.114 * b < 128;
  return {
    dark, paper: `rgb(${r},${g},${b})`, ink: probe("--egl-ink"), muted: probe("--egl-muted"),
    grid: probe("--egl-line"), font: value("--egl-font") || "sans-serif",
    layers: dark ? DARK : LIGHT,
    rule: dark ? "#56B4E9" : "#0072B2", hand: dark ? "#E69F00" : "#D55E00", thaw: "#009E73", pin: "#CC79A7",
  };
}

// Call `changed` whenever JupyterLab, VS Code or the system switches theme; returns how to stop.
function watchTheme(changed) {
  const observer = new MutationObserver(changed);
  const attributes = ["data-jp-theme-name", "data-jp-theme-light", "data-vscode-theme-kind", "class", "data-theme"];
  for (const node of [document.body, document.documentElement]) {
    observer.observe(node, { attributes: true, attributeFilter: attributes });
  }
  const media = matchMedia("(prefers-color-scheme: dark)");
  media.addEventListener("change", changed);
  return () => {
    observer.disconnect();
    media.removeEventListener("change", changed);
  };
}

const escapeHtml = (text) =>
  String(text).replace(/[&<>"']/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[c]);

// Three digits, scientific where that is shorter: 0.2, 3.1e-9, 1,560.
function say(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1).replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// One line that follows the pointer, shared by all panels.
class Tip {
  constructor(root) {
    this.root = root;
    this.node = make("div", { class: "egl-tip", role: "tooltip", hidden: true });
    root.append(this.node);
    root.addEventListener("pointermove", (event) => {
      const marked = event.target.closest?.("[data-tip]");
      if (marked) this.show(marked.dataset.tip, event.clientX, event.clientY);
      else if (this.fromMark) this.hide();
      this.fromMark = Boolean(marked);
    });
    root.addEventListener("pointerleave", () => this.hide());
  }

  show(text, clientX, clientY) {
    const box = this.root.getBoundingClientRect();
    setText(this.node, text);
    this.node.hidden = false;
    const left = Math.min(clientX - box.left + 14, box.width - this.node.offsetWidth - 6);
    this.node.style.left = `${Math.max(4, left)}px`;
    this.node.style.top = `${clientY - box.top + 16}px`;
  }

  hide() {
    this.node.hidden = true;
  }
}
