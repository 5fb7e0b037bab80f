/* Saves a chart as PNG or SVG: on white ground and in its own colours, whatever those of the page are. */
(() => {
  const SCALE = { png: 3, svg: 1 };
  const XMLNS = "http://www.w3.org/2000/svg";

  /* A drawing of the page's own as a file: the variables of the page's colours have those of light pages as their defaults. */
  const saveDrawing = async (shown, format, name) => {
    const svg = shown.cloneNode(true);
    const { x, y, width, height } = shown.viewBox.baseVal;
    const set = (element, values) => Object.entries(values).forEach(([key, value]) => element.setAttribute(key, value));
    const ground = document.createElementNS(XMLNS, "rect");
    set(svg, { width, height });
    set(ground, { x, y, width, height, fill: "#ffffff" });
    svg.prepend(ground);
    const text = new XMLSerializer().serializeToString(svg).replace(/var\(--[\w-]+, ([^)]+)\)/g, "$1");
    const link = Object.assign(document.createElement("a"), { href: `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`, download: `${name}.${format}` });
    if (format === "png") {
      const image = Object.assign(new Image(), { src: link.href });
      await image.decode();
      const canvas = Object.assign(document.createElement("canvas"), { width: width * SCALE.png, height: height * SCALE.png });
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      link.href = canvas.toDataURL();
    }
    link.click();
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-picture]");
    if (!button) return;
    const picture = document.getElementById(button.dataset.picture);
    const drawing = picture?.querySelector(":scope > svg");
    if (drawing) {
      saveDrawing(drawing, button.dataset.format, `pptrace-${button.dataset.picture}`);
      return;
    }
    const plot = picture?.querySelector(".js-plotly-plot");
    if (!plot || !window.Plotly) return;
    const [width, height] = [plot.offsetWidth, plot.offsetHeight]; // without the scale of wide screens
    const layout = { ...plot.layout, paper_bgcolor: "#ffffff", width, height };
    const format = button.dataset.format;
    const filename = `pptrace-${button.dataset.picture}`;
    window.Plotly.downloadImage({ data: window.pptraceCharts.onWhite(plot.data), layout }, { format, filename, scale: SCALE[format], width, height });
  });
})();
