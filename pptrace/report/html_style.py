"""Style sheet and scripts of HTML reports, written into each file. Colours are those of the timeline's style sheet."""

STYLE = """
:root { font: 15px/1.45 system-ui, sans-serif; color: var(--text); background: var(--ground); }
body { margin: 0; }
main { max-width: 1320px; margin: 0 auto; padding: 24px 20px 48px; }
a { color: var(--accent); }
h1 { font-size: 26px; margin: 0 0 12px; }
h1 small { font-weight: 400; font-size: 17px; color: var(--soft); }
h2 { font-size: 19px; margin: 32px 0 8px; }
h3 { font-size: 15px; margin: 20px 0 6px; }
.verdict { font-size: 17px; margin: 0 0 8px; }
.verdict-bar { display: flex; height: 18px; gap: 1px; margin: 0 0 8px; font-size: 12px; line-height: 18px; text-align: center; }
.verdict-bar span { min-width: 1px; overflow: hidden; white-space: nowrap; }
.note { color: var(--soft); font-size: 13px; margin: 4px 0; }
main > dl { display: flex; flex-wrap: wrap; gap: 8px 28px; margin: 0 0 20px; }
main > dl div { display: flex; flex-direction: column; }
main > dl dt { font-size: 12px; color: var(--soft); }
main > dl dd { margin: 0; font-weight: 600; font-variant-numeric: tabular-nums; }
details,
.timeline { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; margin: 0 0 12px; padding: 0 16px; }
.timeline { padding: 10px 12px; font-size: 14px; }
details[open] { padding-bottom: 16px; }
summary { cursor: pointer; padding: 12px 0; font-weight: 600; font-variant-numeric: tabular-nums; }
.figure { margin: 8px 0; background: #fff; color-scheme: light; }
.plot { color: #8d97a5; }
.scroll { overflow-x: auto; }
.scroll table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.scroll th { font-size: 12px; font-weight: 500; color: var(--soft); }
.scroll th { text-align: right; padding: 4px 14px 4px 0; white-space: nowrap; }
.scroll td { text-align: right; padding: 3px 14px 3px 0; white-space: nowrap; border-top: 1px solid var(--line); }
.scroll .label { text-align: left; }
.bar { display: flex; width: 260px; height: 13px; }
.bar-key { display: inline-block; width: 12px; height: 12px; margin: 0 5px 0 12px; vertical-align: -1px; }
h3 + .scroll { margin-bottom: 4px; }
.hang { background: var(--panel); border: 1px solid var(--line); border-left: 4px solid var(--bad); border-radius: 8px; }
.hang { margin: 0 0 16px; padding: 0 16px 12px; }
.hang h2 { margin: 12px 0 4px; color: var(--bad); }
.hang p { margin: 4px 0; }
.waits { display: flex; flex-wrap: wrap; gap: 8px 40px; align-items: center; }
.waits td, .waits th { text-align: left; }
.waits .figure { flex: 0 1 340px; min-width: 300px; }
ul { padding-left: 20px; }
li p { margin: 2px 0 8px; color: var(--soft); }
.info { color: var(--accent); }
.warning, .warnings li { color: var(--warning); }
.warnings li { overflow-wrap: anywhere; }
.critical { color: var(--bad); font-weight: 700; }
footer { margin-top: 40px; color: var(--soft); font-size: 12px; }
"""

TO_STEPS = """
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-step]");
  if (link) document.querySelector(".timeline").timeline.goToStep(Number(link.dataset.step));
});
"""
"""Shows a step in the timeline when its link is followed."""

DRAWING = """
for (const plot of document.querySelectorAll(".plot")) {
  const figure = JSON.parse(plot.previousElementSibling.textContent);
  plot.textContent = "";
  Plotly.newPlot(plot, figure.data, figure.layout, { displaylogo: false, responsive: true });
}
"""
"""Draws the figures."""
