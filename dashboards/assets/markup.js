/* Puts markup into the page that came as an attribute: a table is one Dash component and not one for each of its cells, for which
   Dash takes time by the square of their number. The server has escaped all text of it. */
(() => {
  const put = (element) => {
    if (element.dataset.markup !== element.shownMarkup) {
      element.innerHTML = element.shownMarkup = element.dataset.markup;
    }
  };
  const search = (node) => {
    if (node.nodeType !== Node.ELEMENT_NODE) return;
    if (node.dataset.markup !== undefined) put(node);
    node.querySelectorAll("[data-markup]").forEach(put);
  };
  new MutationObserver((changes) => {
    for (const change of changes) {
      if (change.type === "attributes") put(change.target);
      else change.addedNodes.forEach(search);
    }
  }).observe(document, { subtree: true, childList: true, attributes: true, attributeFilter: ["data-markup"] });
})();
