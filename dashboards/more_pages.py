"""The pages besides overview, timeline and schedules, by their addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dash import Dash

from dashboards import exports
from dashboards.address import NOTHING, Query
from dashboards.answers import Answers
from dashboards.components import Node
from dashboards.pages import bubbles, communication, compare, experts, hang, live, memory, problem, stages, steps
from dashboards.store import Loaded, Store


@dataclass(frozen=True, slots=True)
class Page:
    """A page by its name in the header. ``needs_report``: without an analysis the reason is shown in its place.

    ``has_fields``: its layout takes the query of the address too, which has what its fields show.
    """

    name: str
    layout: Callable[..., Node]
    needs_report: bool = True
    has_fields: bool = False


PAGES: Mapping[str, Page] = {
    "/steps": Page("Steps", steps.layout),
    "/bubbles": Page("Bubbles", bubbles.layout, has_fields=True),
    "/communication": Page("Communication", communication.layout, has_fields=True),
    "/memory": Page("Memory", memory.layout),
    "/stages": Page("Stages", stages.layout, has_fields=True),
    "/experts": Page("Experts", experts.layout),
    "/compare": Page("Compare", compare.layout),
    "/live": Page("Live", live.layout, needs_report=False),
    "/hang": Page("Hang", hang.layout, needs_report=False),
}


def layout(path: str, loaded: Loaded, answers: Answers, query: Query = NOTHING) -> Node:
    """The page of an address."""
    page = PAGES[path]
    if page.needs_report and loaded.analysis is None:
        return problem.layout(loaded)
    return page.layout(loaded, answers, query) if page.has_fields else page.layout(loaded, answers)


def register(app: Dash, store: Store, answers: Answers) -> None:
    """Register the callbacks of all pages, and the files that they link."""
    for page in (steps, bubbles, communication, stages, compare, live):
        page.register(app, store, answers)
    exports.register(app, answers)
