"""How the report looks: its style sheet, and the lines that fit the charts to page width and colours."""

from __future__ import annotations

CSS = """
:root { color-scheme: light dark; --ink: #1f2328; --faint: #59636e; --line: #d8dde3; --page: #f6f7f9;
  --card: #ffffff; --accent: #0072B2; --bad: #b3400a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --faint: #a3abb5; --line: #3d4148;
  --page: #0f1115; --card: #16181d; --accent: #56B4E9; --bad: #ff9a66; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 0 0 8px; }
.note { color: var(--faint); font-size: .85rem; margin: 2px 0 10px; }
.failed { border-left: 4px solid var(--bad); padding: 8px 12px; background: var(--card); color: var(--bad); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px;
  margin: 14px 0; min-width: 0; }
section.plot { padding: 6px 8px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(122px, 1fr)); gap: 12px; border: 0;
  padding: 0; background: none; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
.card .label { font-size: .8rem; color: var(--faint); }
.card .value { font-size: 1.45rem; font-weight: 600; color: var(--accent); line-height: 1.3; }
.card .note { margin: 0; font-size: .78rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 14px;
  margin: 14px 0; }
.pair section { margin: 0; }
.scroll { overflow: auto; max-height: 460px; }
.wide table { min-width: 980px; }
.scroll:focus-visible { outline: 2px solid var(--accent); }
table { border-collapse: collapse; width: 100%; font-size: .87rem; font-variant-numeric: tabular-nums; }
th { position: sticky; top: 0; background: var(--card); box-shadow: inset 0 -2px var(--line); }
th, td { padding: 5px 10px 5px 0; vertical-align: top; }
td { border-bottom: 1px solid var(--line); }
h3 { font-size: .92rem; margin: 10px 0 4px; }
.sheet { display: flex; flex-wrap: wrap; gap: 8px; }
.sheet figure { margin: 0; text-align: center; font-size: .75rem; line-height: 1.25; color: var(--faint); }
.sheet img { display: block; margin: 0 auto; image-rendering: pixelated; border-radius: 3px; }
@media print { section, .card { break-inside: avoid; } .scroll { max-height: none; overflow: visible; } }
"""

THEME_SCRIPT = """
const themes = __THEMES__;
const dark = window.matchMedia('(prefers-color-scheme: dark)');
function dress(name) {
  const theme = themes[name];
  for (const plot of document.querySelectorAll('.plotly-graph-div')) {
    const change = {'font.color': theme.ink, 'modebar.activecolor': theme.ink};
    for (const key of Object.keys(plot.layout)) {
      if (/^[xy]axis/.test(key)) change[key + '.gridcolor'] = theme.grid;
    }
    Plotly.relayout(plot, change);
  }
}
dress(dark.matches ? 'dark' : 'light');
const fit = new ResizeObserver(entries => {
  for (const entry of entries) Plotly.Plots.resize(entry.target.querySelector('.plotly-graph-div'));
});
document.querySelectorAll('section.plot').forEach(frame => fit.observe(frame));
dark.addEventListener('change', () => dress(dark.matches ? 'dark' : 'light'));
window.addEventListener('beforeprint', () => dress('light'));
window.addEventListener('afterprint', () => dress(dark.matches ? 'dark' : 'light'));
"""
