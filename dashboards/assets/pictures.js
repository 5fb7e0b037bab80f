/* Saves a chart as PNG or SVG: on white ground and in its own colours, whatever those of the page are. */
(() => {
  const SCALE = { png: 3, svg: 1 };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-picture]");
    if (!button) return;
    const plot = document.getElementById(button.dataset.picture)?.querySelector(".js-plotly-plot");
    if (!plot || !window.Plotly) return;
    const [width, height] = [plot.offsetWidth, plot.offsetHeight]; // without the scale of wide screens
    const layout = { ...plot.layout, paper_bgcolor: "#ffffff", width, height };
    const format = button.dataset.format;
    const filename = `pptrace-${button.dataset.picture}`;
    window.Plotly.downloadImage({ data: window.pptraceCharts.onWhite(plot.data), layout }, { format, filename, scale: SCALE[format], width, height });
  });
})();
