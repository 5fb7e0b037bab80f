"""Pages judged by axe-core, when all of them is drawn."""

from __future__ import annotations

from typing import Any

from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import TimeoutError as PageTimeoutError

AWAITED = """() => Object.entries({
    'a page': !document.querySelector('#page > *'),
    'what dash loads': document.querySelector('[data-dash-is-loading=true]'),
    'a graph that is pending': document.querySelector('.dash-graph--pending'),
    'a dropdown': document.querySelector('.dash-dropdown-focus-target[tabindex="0"]'),
    'a graph that is drawn': [...document.querySelectorAll('.dash-graph')].find(graph => !graph.querySelector('.main-svg')),
    'the timeline': [...document.querySelectorAll('#timeline')].find(root => root.dataset.complete !== 'true'),
    'a part': [...document.querySelectorAll('#page [id$=-body]:not(#try-body, #links-body)')].find(body => !body.children.length),
}).filter(([_, missing]) => missing).map(([name, missing]) => `${name} ${missing.outerHTML?.slice(0, 300) ?? ''}`)"""
"""The parts that a page still waits for."""
AXE = """async (options) => (await axe.run({ exclude: [['.main-svg'], ['tbody tr:nth-child(n+3)']] },
    { resultTypes: ['violations'], ...options })).violations.flatMap(
    rule => rule.nodes.map(node => `${rule.id}: ${node.html.slice(0, 200)}`))"""
CONTRAST = {"runOnly": ["color-contrast", "link-in-text-block"]}


def settle(page: Any) -> Any:
    """Wait until the page shows everything. Raises AssertionError that says what it waits for, where it never does."""
    try:
        page.wait_for_function(f"() => ({AWAITED})().length === 0", polling=25)
    except PageTimeoutError as err:
        raise AssertionError(f"{page.url} still waits for {page.evaluate(AWAITED)}") from err
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
