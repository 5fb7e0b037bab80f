/* What Dash's controls do to one another without the server. */
(() => {
  /* The step of the point that was clicked, for the choice of steps; nothing where the point has none, as a bar of a histogram. */
  const clickedStep = (clicked) => {
    const step = clicked?.points?.[0]?.customdata;
    return Number.isInteger(step) ? step : window.dash_clientside.no_update;
  };

  /* A field and its slider show the same: the one that was moved sets the other. Today's value, which the field's placeholder has,
     is no change, so that the field is then empty. */
  const SLIDER = "-slider.value";
  const slide = (written, placed, isToday) => (slid, typed, today) => {
    const { no_update: same, callback_context: context } = window.dash_clientside;
    const slider = context.triggered.map(({ prop_id: moved }) => moved).find((moved) => moved.endsWith(SLIDER));
    if (!slider) return [same, placed(typed || today, slid)];
    const text = written(slid);
    if (!isToday(text, today)) return [text, same];
    document.getElementById(slider.slice(0, -SLIDER.length)).value = ""; // a field of a number that Dash empties is given NaN
    return ["", same];
  };
  const isNumber = (number, today) => number === Number(today);
  const slideWhole = slide(Number, Number, isNumber);
  const slideTimes = slide((doublings) => 2 ** doublings, (times) => Math.log2(Number(times)), isNumber);

  /* Borders between stages, in layers from the first, and the layers of each stage; the number of all layers is that of today. */
  const layersOf = (text) => String(text).split(/[ ,]+/).filter(Boolean).map(Number);
  const sum = (layers) => layers.reduce((all, one) => all + one, 0);
  const slideSplit = (borders, typed, today) => {
    const all = sum(layersOf(today));
    const written = (ends) => [...ends, all].map((end, stage) => end - (stage ? ends[stage - 1] : 0)).join(",");
    const placed = (text, before) => {
      const layers = layersOf(text);
      if (layers.length !== before.length + 1 || sum(layers) !== all) return window.dash_clientside.no_update;
      return layers.slice(0, -1).map((_, stage) => sum(layers.slice(0, stage + 1)));
    };
    return slide(written, placed, (text, same) => text === same)(borders, typed, today);
  };
  window.dash_clientside = Object.assign({}, window.dash_clientside, { pptrace: { clickedStep, slideWhole, slideTimes, slideSplit } });
})();
