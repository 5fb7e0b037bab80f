"""Pages judged by axe-core, when all of them is drawn."""

from __future__ import annotations

from typing import Any

from axe_playwright_python.base import AXE_SCRIPT

SETTLED = """() => document.querySelector('#page > *') && !document.querySelector('[data-dash-is-loading=true]')
    && !document.querySelector('.dash-graph--pending') && !document.querySelector('.dash-dropdown-focus-target[tabindex="0"]')
    && [...document.querySelectorAll('.dash-graph')].every(graph => graph.querySelector('.main-svg'))
    && [...document.querySelectorAll('#timeline')].every(root => root.dataset.complete)
    && [...document.querySelectorAll('#page [id$=-body]:not(#try-body, #links-body)')].every(body => body.children.length)"""
AXE = """async (options) => (await axe.run({ exclude: [['.main-svg'], ['tbody tr:nth-child(n+3)']] },
    { resultTypes: ['violations'], ...options })).violations.flatMap(
    rule => rule.nodes.map(node => `${rule.id}: ${node.html.slice(0, 200)}`))"""
CONTRAST = {"runOnly": ["color-contrast", "link-in-text-block"]}


def settle(page: Any) -> Any:
    page.wait_for_function(SETTLED, polling=25)
    return page


def violations(page: Any, in_dark: bool = True) -> list[str]:
    """The findings of axe: all rules in the light, and those about colours ``in_dark``."""
    page.emulate_media(color_scheme="light")
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE_SCRIPT)
    found: list[str] = page.evaluate(AXE, {})
    if not in_dark:
        return found
    page.emulate_media(color_scheme="dark")
    return [*found, *page.evaluate(AXE, CONTRAST)]
