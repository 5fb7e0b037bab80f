/* Saves the page as it is shown as one HTML file: charts and the timeline as pictures, tables and texts as they are, without scripts.
   Its content security policy lets it load nothing. */
(() => {
  const POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:";
  const LEFT_OUT = "button, canvas, script, input, .files, .help, .verify, .timeline-tools, .slider, .show-me, .timeline-legend, .dash-dropdown-focus-target, [hidden]";
  const XML = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
  const escape = (text) => text.replace(/[&<>"]/g, (letter) => XML[letter]);
  const address = (svg) => `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  const make = (name, properties) => Object.assign(document.createElement(name), properties);

  const pictureOf = async (plot) => {
    const [width, height] = [plot.offsetWidth, plot.offsetHeight];
    const layout = { ...plot.layout, paper_bgcolor: "#ffffff", width, height };
    const alt = plot.closest("section")?.querySelector("h2")?.textContent || "chart";
    return make("img", { src: await window.Plotly.toImage({ data: window.pptraceCharts.onWhite(plot.data), layout }, { format: "svg", width, height }), alt, width, height });
  };
  const timelineOf = (canvas, timeline) => {
    return make("img", { src: address(timeline.svg()), alt: "timeline", width: canvas.getBoundingClientRect().width });
  };
  const valueOf = (field) => make("span", { className: "value", textContent: field.matches("input") ? field.value || field.placeholder : field.innerText });

  /* A copy of a part of the page in which what only scripts can show is a picture or text. */
  const still = async (shown) => {
    const copy = shown.cloneNode(true);
    const replaced = [];
    const replace = (selector, by) => {
      const originals = shown.querySelectorAll(selector);
      copy.querySelectorAll(selector).forEach((node, index) => replaced.push([node, by(originals[index])]));
    };
    replace(".js-plotly-plot", pictureOf);
    replace("label input, button.dash-dropdown", valueOf);
    replace("canvas", (canvas) => {
      const timeline = canvas.closest(".timeline")?.timeline;
      return canvas === timeline?.canvas && timeline.drawn ? timelineOf(canvas, timeline) : "";
    });
    replace("a", (link) => make("span", { textContent: link.textContent, className: link.className }));
    for (const [node, other] of replaced) node.replaceWith(await other);
    copy.querySelectorAll(LEFT_OUT).forEach((node) => node.remove());
    copy.querySelectorAll("[data-markup]").forEach((node) => delete node.dataset.markup);
    return copy.outerHTML;
  };
  const isDrawn = () =>
    !document.querySelector("[data-dash-is-loading=true], .dash-graph--pending, .timeline:not([data-complete=true])") && [...document.querySelectorAll(".dash-graph")].every((graph) => graph.querySelector(".main-svg"));
  const drawn = async () => {
    for (let times = 0; times < 100 && !isDrawn(); times += 1) await new Promise((done) => setTimeout(done, 50));
  };

  const styles = () => [...document.styleSheets].map((sheet) => [...sheet.cssRules].map((rule) => rule.cssText).join("\n")).join("\n");

  const save = async () => {
    await drawn();
    const name = document.querySelector("header nav a.here")?.textContent || "page";
    const title = `${document.querySelector("#run-title")?.textContent || ""} · ${name}`;
    const step = document.querySelector("#step-box:not(.hidden) button.dash-dropdown")?.innerText;
    const parts = [await still(document.getElementById("facts")), await still(document.getElementById("page"))];
    const head = `<header><h1><span class="brand">pptrace</span><span class="run-title">${escape(title)}${step ? ` · step ${escape(step)}` : ""}</span></h1></header>`;
    const page = `<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="${POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>${escape(title)} · pptrace</title><style>${styles()}</style></head>
<body><div id="app">${head}${parts.join("")}</div></body></html>`;
    const link = make("a", { href: URL.createObjectURL(new Blob([page], { type: "text/html" })), download: `pptrace-${name.toLowerCase()}.html` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  document.addEventListener("click", (event) => event.target.closest("#save-page") && save());
})();
