/* Says on an open page that its server has ended, until one answers again, or that it could not answer what was asked. */
(() => {
  const EVERY_MS = 5000;
  const ENDED = "The server has ended or cannot be reached: this page shows what it had loaded. Start pptrace dashboard again at the same address, and reload.";
  const unanswered = (status) => `The server could not answer what was last asked of it (HTTP ${status}): what that would change is shown as before. Its terminal says why.`;
  const remove = (id) => document.getElementById(id)?.remove();
  const show = (id, textContent) => {
    if (document.getElementById(id)?.textContent === textContent) return;
    remove(id);
    const box = Object.assign(document.createElement("p"), { id, className: "ended", textContent });
    box.setAttribute("role", "alert");
    document.body.prepend(box);
  };
  const look = async () => {
    if (!document.hidden) {
      const answers = await fetch("/timeline-data/opening").then(() => true).catch(() => false);
      if (answers) remove("ended");
      else show("ended", ENDED);
    }
    setTimeout(look, EVERY_MS);
  };
  setTimeout(look, EVERY_MS);
  const plain = window.fetch;
  window.fetch = async (...asked) => {
    const answer = await plain(...asked);
    if (String(asked[0]).includes("_dash-update-component")) {
      if (answer.status >= 400) show("unanswered", unanswered(answer.status));
      else if (answer.status === 200) remove("unanswered");
    }
    return answer;
  };
})();
