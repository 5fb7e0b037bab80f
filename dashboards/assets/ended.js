/* Says on an open page that its server has ended, until one answers again. */
(() => {
  const EVERY_MS = 5000;
  const TEXT = "The server has ended or cannot be reached: this page shows what it had loaded. Start pptrace dashboard again at the same address, and reload.";
  const banner = () => document.getElementById("ended");
  const show = () => {
    if (banner()) return;
    const box = Object.assign(document.createElement("p"), { id: "ended", className: "ended", textContent: TEXT });
    box.setAttribute("role", "alert");
    document.body.prepend(box);
  };
  const look = async () => {
    if (!document.hidden) {
      const answers = await fetch("/timeline-data/opening").then(() => true).catch(() => false);
      if (answers) banner()?.remove();
      else show();
    }
    setTimeout(look, EVERY_MS);
  };
  setTimeout(look, EVERY_MS);
})();
