/* How far a large run has been read, while the first page waits for it. */
(() => {
  const EVERY_MS = 600;
  const show = (box, { read, num_files: numFiles }) => {
    const text = document.createElement("p");
    const files = `${numFiles.toLocaleString("en")} file${numFiles === 1 ? "" : "s"}`;
    text.textContent = !numFiles ? "Opening the run …" : read < 0.995 ? `Reading ${files}: ${Math.floor(read * 100)} %` : `${files} read. Analysing …`;
    const bar = Object.assign(document.createElement("progress"), { max: 1 });
    if (numFiles && read < 0.995) bar.value = read;
    bar.setAttribute("aria-label", "Opening the run");
    box.replaceChildren(text, bar);
  };
  const look = async () => {
    const [box, page] = [document.getElementById("opening"), document.getElementById("page")];
    const isThere = page && page.childElementCount > 0;
    const state = isThere ? null : await fetch("/timeline-data/opening").then((answer) => answer.json()).catch(() => null);
    if (isThere) return box.replaceChildren();
    if (box && state && !state.is_open && page.childElementCount === 0) show(box, state);
    setTimeout(look, EVERY_MS);
  };
  setTimeout(look, EVERY_MS);
})();
