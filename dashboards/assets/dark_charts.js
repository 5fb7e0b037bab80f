/* On dark pages heat maps take the second colour scale that their figures bring (meta.dark), whose low values are as dark as the page.
   Files of charts, which are on white ground, keep the first one. */
(() => {
  const isDark = matchMedia("screen and (prefers-color-scheme: dark)");
  const inScale = (trace, dark) => {
    const { meta } = trace;
    if (!meta?.dark) return trace;
    const light = meta.light || trace.colorscale;
    return { ...trace, colorscale: dark ? meta.dark : light, meta: { ...meta, light } };
  };
  const inScales = (data, dark) => (Array.isArray(data) ? data.map((trace) => inScale(trace, dark)) : data);

  const adapt = (plotly) => {
    const { react } = plotly;
    plotly.react = (box, figure, ...rest) => {
      const given = figure?.data ? { ...figure, data: inScales(figure.data, isDark.matches) } : figure;
      return react(box, given, ...rest);
    };
    return plotly;
  };
  if (window.Plotly) adapt(window.Plotly);
  else {
    Object.defineProperty(window, "Plotly", {
      configurable: true,
      get: () => undefined,
      set: (value) => Object.defineProperty(window, "Plotly", { configurable: true, writable: true, value: adapt(value) }),
    });
  }
  isDark.addEventListener("change", () => {
    document.querySelectorAll(".js-plotly-plot").forEach((plot) => {
      const { data, layout } = plot;
      if (data?.some((trace) => trace.meta?.dark)) window.Plotly.react(plot, { data, layout });
    });
  });
  window.pptraceCharts = { onWhite: (data) => inScales(data, false) };
})();
