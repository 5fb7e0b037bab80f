"""Style sheet and script of HTML reports, written into each file."""

STYLE = """
:root { color-scheme: light; font: 15px/1.45 system-ui, sans-serif; color: #16181d; background: #f6f7f9; }
body { margin: 0; }
main { max-width: 1320px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 26px; margin: 0 0 12px; }
h1 small { font-weight: 400; font-size: 17px; color: #66717f; }
h2 { font-size: 19px; margin: 32px 0 8px; }
h3 { font-size: 15px; margin: 20px 0 6px; }
.verdict { font-size: 17px; margin: 0 0 8px; }
.verdict-bar { display: flex; height: 18px; gap: 1px; margin: 0 0 8px; font-size: 12px; line-height: 18px; text-align: center; }
.verdict-bar span { min-width: 1px; overflow: hidden; white-space: nowrap; }
.note { color: #66717f; font-size: 13px; margin: 4px 0; }
dl { display: flex; flex-wrap: wrap; gap: 8px 28px; margin: 0 0 20px; }
dl div { display: flex; flex-direction: column; }
dt { font-size: 12px; color: #66717f; }
dd { margin: 0; font-weight: 600; font-variant-numeric: tabular-nums; }
details { background: #fff; border: 1px solid #dfe3e8; border-radius: 8px; margin: 0 0 12px; padding: 0 16px; }
details[open] { padding-bottom: 16px; }
summary { cursor: pointer; padding: 12px 0; font-weight: 600; font-variant-numeric: tabular-nums; }
.figure { margin: 8px 0; background: #fff; }
.plot { color: #8d97a5; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { font-size: 12px; color: #66717f; font-weight: 500; text-align: right; padding: 4px 14px 4px 0; white-space: nowrap; }
td { text-align: right; padding: 3px 14px 3px 0; white-space: nowrap; border-top: 1px solid #eceff2; }
.label { text-align: left; }
h3 + .scroll { margin-bottom: 4px; }
.hang { background: #fff; border: 1px solid #dfe3e8; border-left: 4px solid #c0392b; border-radius: 8px; }
.hang { margin: 0 0 16px; padding: 0 16px 12px; }
.hang h2 { margin: 12px 0 4px; color: #c0392b; }
.hang p { margin: 4px 0; }
.waits { display: flex; flex-wrap: wrap; gap: 8px 40px; align-items: center; }
.waits td, .waits th { text-align: left; }
.waits .figure { flex: 0 1 340px; min-width: 300px; }
ul { padding-left: 20px; }
li p { margin: 2px 0 8px; color: #66717f; }
.info { color: #0072b2; } .warning { color: #b35c00; } .critical { color: #c0392b; font-weight: 700; }
.warnings li { color: #7a4b00; }
footer { margin-top: 40px; color: #8d97a5; font-size: 12px; }
"""

DRAWING = """
function draw() {
  const waiting = [...document.querySelectorAll(".plot:not(.drawn)")].filter(plot => !plot.closest("details:not([open])"));
  const next = () => {
    const plot = waiting.shift();
    if (!plot) return;
    plot.classList.add("drawn");
    plot.textContent = "";
    const figure = JSON.parse(plot.previousElementSibling.textContent);
    Plotly.newPlot(plot, figure.data, figure.layout, CONFIG).then(() => setTimeout(next));
  };
  setTimeout(next);
}
document.querySelectorAll("details").forEach(step => step.addEventListener("toggle", draw));
draw();
"""
"""Draws the figures of the steps that are open, one after another; a figure drawn while hidden would have no width."""
