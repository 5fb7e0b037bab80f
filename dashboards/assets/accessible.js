/* What Dash's components leave out for keyboards and screen readers: boxes that scroll can be reached with Tab, fields that only pass
   focus on cannot, and the link to the page that is shown says so. */
(() => {
  const SCROLLED = ".table-box, .picture-box, .still, .timeline-side";
  const reach = (box) => {
    const scrolls = box.scrollHeight > box.clientHeight + 1 || box.scrollWidth > box.clientWidth + 1;
    if (scrolls === (box.tabIndex === 0)) return;
    if (scrolls) {
      box.tabIndex = 0;
      if (!box.hasAttribute("role")) box.setAttribute("role", "group");
      if (!box.hasAttribute("aria-label")) box.setAttribute("aria-label", box.closest("section")?.querySelector("h2")?.textContent || "Details");
    } else box.removeAttribute("tabindex");
  };
  const sizes = new ResizeObserver((entries) => entries.forEach((entry) => reach(entry.target.closest(SCROLLED) || entry.target)));
  const seen = new WeakSet();
  const watch = (box) => {
    for (const part of [box, ...box.children]) {
      if (seen.has(part)) continue;
      seen.add(part);
      sizes.observe(part); // which answers at once, and whenever its size changes
    }
  };
  const reachChoice = (field) => {
    const button = field.parentElement.querySelector("button.dash-dropdown");
    if (!button || field.disabled) return;
    if (field.tabIndex === 0) field.tabIndex = -1; // hidden from screen readers, it would pass the focus on
    if (button.tabIndex === 0) return;
    button.tabIndex = 0;
    const name = button.closest("label")?.querySelector("span");
    if (!name) return;
    name.id ||= `${button.id}-name`;
    button.setAttribute("aria-labelledby", `${name.id} ${button.getAttribute("aria-labelledby") || ""}`);
  };
  const nameSlider = (handle) => { // one of several has a name that counts them
    const field = handle.closest(".plan-field, .plan-list")?.querySelector("label span")?.textContent;
    const name = handle.getAttribute("aria-label");
    if (field && !name?.startsWith(field)) handle.setAttribute("aria-label", name ? `${field}: ${name}` : field);
  };
  const nameChoices = (list) => { // Dash calls choices that are all shown a list box of options, which have no fields in them
    list.setAttribute("role", "radiogroup");
    if (!list.hasAttribute("aria-label")) list.setAttribute("aria-label", list.closest("[data-name]")?.dataset.name || "Choices");
    for (const option of list.querySelectorAll("[role=option], [aria-selected]")) {
      option.removeAttribute("role");
      option.removeAttribute("aria-selected");
    }
  };
  const update = () => {
    document.querySelectorAll(".dash-radioitems").forEach(nameChoices);
    document.querySelectorAll(SCROLLED).forEach(watch);
    document.querySelectorAll(".dash-dropdown-focus-target").forEach(reachChoice);
    document.querySelectorAll("[role=slider]").forEach(nameSlider);
    for (const link of document.querySelectorAll("header nav a")) {
      if (link.classList.contains("here")) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
  };
  let isAwaited = false;
  new MutationObserver(() => {
    if (isAwaited) return;
    isAwaited = true;
    requestAnimationFrame(() => {
      isAwaited = false;
      update();
    });
  }).observe(document, { subtree: true, childList: true, attributes: true, attributeFilter: ["class", "data-markup", "tabindex"] });
})();
