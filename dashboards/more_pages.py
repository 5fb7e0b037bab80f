"""The pages besides overview, timeline and schedules, by their addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dash import Dash

from dashboards import exports
from dashboards.answers import Answers
from dashboards.components import Node
from dashboards.exports import whole_run
from dashboards.pages import bubbles, communication, compare, experts, hang, live, memory, problem, stages, steps
from dashboards.store import Loaded, Store

__all__ = ["PAGES", "layout", "register", "whole_run"]


@dataclass(frozen=True, slots=True)
class Page:
    """A page by its name in the header. ``needs_report``: without an analysis the reason is shown in its place."""

    name: str
    layout: Callable[[Loaded, Answers], Node]
    needs_report: bool = True


PAGES: Mapping[str, Page] = {
    "/steps": Page("Steps", steps.layout),
    "/bubbles": Page("Bubbles", bubbles.layout),
    "/communication": Page("Communication", communication.layout),
    "/memory": Page("Memory", memory.layout),
    "/stages": Page("Stages", stages.layout),
    "/experts": Page("Experts", experts.layout),
    "/compare": Page("Compare", compare.layout),
    "/live": Page("Live", live.layout, needs_report=False),
    "/hang": Page("Hang", hang.layout, needs_report=False),
}


def layout(path: str, loaded: Loaded, answers: Answers) -> Node:
    page = PAGES[path]
    return problem.layout(loaded) if page.needs_report and loaded.analysis is None else page.layout(loaded, answers)


def register(app: Dash, store: Store, answers: Answers) -> None:
    """Register the callbacks of all pages, and the files that they link."""
    for page in (steps, bubbles, communication, stages, compare, live):
        page.register(app, store, answers)
    exports.register(app, answers)
