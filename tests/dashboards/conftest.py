"""A browser, served dashboards, and small run directories."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from dashboards.app import create_app
from dashboards.serve import url_of
from tests.dashboards.attacker import PRIVATE, SECRET, Target, attacked, serving
from tests.dashboards.synthetic import write_run
from tools import get_browser

HERE = Path(__file__).resolve().parent
PAGE_MS = 120_000
"""Limit of one wait for a page that hangs. On a machine busy with other things charts took 8 s."""
Serve = Callable[[Sequence[Path]], str]


@pytest.fixture(scope="session")
def run_p4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Synthetic: 1f1b, p=4, m=8, three steps of different length."""
    return write_run(tmp_path_factory.mktemp("p4"), "1f1b", pp=4, num_microbatches=8, num_steps=3)


@pytest.fixture(scope="session")
def serve() -> Iterator[Serve]:
    """Serve a dashboard of some paths in place of the one before; its address.

    It is always the same, so that a browser compiles the scripts, most of what a page costs, only once.
    """
    shown: list[Any] = []

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        return shown[-1](environ, start_response)

    apps = cache(create_app)

    def serve_paths(paths: Sequence[Path]) -> str:
        shown.append(apps(tuple(paths)).server)
        return url_of(listener)

    with serving(app) as listener:
        yield serve_paths


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> Iterator[Any]:
    """A window of a headless Chromium, whose pages share what was loaded and compiled. Where there is none a test fails.

    They share a process, too, which a page that stays open keeps: a new one would optimise the scripts anew, a third of a visit.
    Each page would have its own where sites are isolated, whatever the limit.
    """
    try:
        path = get_browser.find_browser()
    except get_browser.NoBrowserError as err:
        pytest.fail(str(err), pytrace=False)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        window = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("browser"),  # only with a directory of its own does it keep compiled scripts
            executable_path=str(path),
            args=[*get_browser.BROWSER_ARGS, "--renderer-process-limit=1", "--disable-site-isolation-trials"],
            timeout=60_000,
            viewport={"width": 1400, "height": 900},
        )
        window.set_default_timeout(PAGE_MS)
        window.new_page().goto(serve([HERE]) + "assets/style.css")
        yield window
        window.close()


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A protected dashboard of a small run, with a file next to the run that nobody opened; one server for all attacks."""
    folder = tmp_path_factory.mktemp("opened")
    (folder / "private.json").write_text(json.dumps({"traceEvents": [], "words": PRIVATE}))
    run = folder / "run"
    run.mkdir()
    write_run(run, "1f1b", pp=2, num_microbatches=2)
    with attacked(create_app([run], secret=SECRET)) as served:
        yield served


@dataclass
class Visit:
    """A page, with what it asked for and complained about."""

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def foreign_requests(self) -> list[str]:
        return [url for url in self.requests if not url.startswith(("http://127.0.0.1:", "data:", "blob:"))]


Visiting = Callable[[str], Visit]


@contextmanager
def visiting(browser: Any) -> Iterator[Visiting]:
    """Open addresses at 1400×900; in the end what the pages asked for, and complained about, is judged.

    A page's policy lets no text be run: ``wait_for_function`` takes a function, ``() => …``. It is asked 40 times a second;
    where it is asked before each frame, all frames are drawn.
    """
    visits: list[Visit] = []

    def open_page(url: str) -> Visit:
        page = browser.new_page()
        page.wait_for_function = partial(page.wait_for_function, polling=25)
        opened = Visit(page)
        visits.append(opened)
        page.on("request", lambda request: opened.requests.append(request.url))
        page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        page.on(
            "console",
            lambda message: opened.complaints.append(message.text) if message.type in ("error", "warning") else None,
        )
        page.goto(url)
        return opened

    yield open_page
    for opened in visits:
        opened.page.close()
    for opened in visits:
        assert opened.complaints == []
        assert opened.foreign_requests() == []
        assert len(opened.requests) > 3


@pytest.fixture
def visit(browser: Any) -> Iterator[Visiting]:
    """Open an address; its page is judged when the test ends."""
    with visiting(browser) as open_page:
        yield open_page
