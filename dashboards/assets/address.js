/* The address of a page holds what was chosen on it, so that a link shows the same and Back comes back to it. The server reads it when it
   makes the page. The timeline writes its own (timeline.js), of which the step is a part. */
(() => {
  const TIMELINE = "/timeline";
  const write = (change) => {
    const query = new URLSearchParams(location.search);
    change(query);
    const text = query.toString();
    const address = `${location.pathname}${text ? `?${text}` : ""}`;
    if (address !== `${location.pathname}${location.search}`) history.replaceState(history.state, "", address);
  };
  const isEmpty = (value) => value === null || value === undefined || value === "" || Number.isNaN(value);

  /* Fields, by their ids without what these begin with. They go with their page, so that they are those of the page that is shown. */
  const PREFIX = /^(plan-try-|plan-|size-|try-|link-|stage-)/;
  const keepFields = (...values) => {
    const { no_update: same, callback_context: context } = window.dash_clientside;
    const names = context.inputs_list.map(({ id }) => id.replace(PREFIX, ""));
    write((query) => names.forEach((name, index) => (isEmpty(values[index]) ? query.delete(name) : query.set(name, values[index]))));
    return same;
  };
  const keepStep = (step) => {
    if (Number.isInteger(step) && location.pathname !== TIMELINE) write((query) => query.set("step", step));
    return window.dash_clientside.no_update;
  };
  /* The link to the page that is shown leads nowhere else: it would leave an entry in the history that Back has to pass. */
  document.addEventListener(
    "click",
    (event) => {
      if (event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
      if (!event.target.closest?.("header nav a.here")) return;
      event.preventDefault();
      event.stopPropagation();
    },
    true,
  );
  window.dash_clientside = Object.assign({}, window.dash_clientside, { pptraceAddress: { keepFields, keepStep } });
})();
