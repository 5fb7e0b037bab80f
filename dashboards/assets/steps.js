/* The step of the point that was clicked, for the choice of steps; nothing where the point has none, as a bar of a histogram. */
window.dash_clientside = Object.assign({}, window.dash_clientside, {
  pptrace: {
    clickedStep: (clicked) => {
      const step = clicked?.points?.[0]?.customdata;
      return Number.isInteger(step) ? step : window.dash_clientside.no_update;
    },
  },
});
