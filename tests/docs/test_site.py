"""The documentation builds as a site without a network, and without a broken link."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pptrace.cli.main import cli
from tests.support.extent import ALL
from tests.support.programs import ROOT

DOCS = ROOT / "docs"
OFFLINE = """
import gc, os, socket, sys
gc.disable()
def refuse(*arguments, **options):
    raise OSError("the build used the network")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from sphinx.builders.html import StandaloneHTMLBuilder
from sphinx.cmd.build import main
StandaloneHTMLBuilder.search = "PPTRACE_ALL" in os.environ
sys.exit(main(sys.argv[1:]))
"""
needs_sphinx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sphinx", "myst_parser", "furo", "sphinx_click")),
    reason="needs the extra docs",
)


def _build(source: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    options = ["-b", "html", "-n", "-W", "--keep-going", "-q", "-d", str(out / "trees"), *more]
    command = [sys.executable, "-c", OFFLINE, *options, "-c", str(DOCS), str(source), str(out / "html")]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def _loaded_from_elsewhere(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="(https?:[^"]+)"', text)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pages; in the project's theme, half of the work, only with PPTRACE_ALL: another test has one page in it."""
    out = tmp_path_factory.mktemp("site")
    built = _build(DOCS, out, *([] if ALL else ["-D", "html_theme=basic", "-D", "smartquotes=0"]))
    assert built.returncode == 0, built.stdout + built.stderr
    return out / "html"


@needs_sphinx
def test_the_command_line_page_has_every_command(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "cli.html").read_text(encoding="utf-8"))
    assert all(f"pptrace {name} [OPTIONS]" in " ".join(text.split()) for name in cli.list_commands(None))


@needs_sphinx
def test_every_page_is_in_the_site_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        if "_build" in page.parts:
            continue
        assert _loaded_from_elsewhere(site / page.relative_to(DOCS).with_suffix(".html")) == [], page


@needs_sphinx
def test_each_broken_link_fails_the_build_and_the_theme_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "index.md").write_text(
        "# Here\n\n[page](gone1.md)\n\n[heading](index.md#gone2)\n\n[label](#gone3)\n\n{term}`gone4`\n"
    )
    built = _build(source, tmp_path)
    assert built.returncode != 0
    assert all(f"'gone{number}" in built.stderr for number in (1, 2, 3, 4)), built.stderr
    assert "furo" in (tmp_path / "html" / "index.html").read_text(encoding="utf-8")
    assert _loaded_from_elsewhere(tmp_path / "html" / "index.html") == []


@pytest.mark.parametrize("package", ["pptrace", "instrument", "dashboards"])
def test_the_map_names_every_package(package: str) -> None:
    map_of_packages = (DOCS / "architecture.md").read_text(encoding="utf-8")
    folders = {init.parent.relative_to(ROOT).as_posix() for init in (ROOT / package).rglob("__init__.py")} - {"pptrace"}
    assert len(folders) > 1
    assert not {folder for folder in folders if f"`{folder}/`" not in map_of_packages}


def test_the_map_names_no_package_or_module_that_is_gone() -> None:
    map_of_packages = (DOCS / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:pptrace|instrument|dashboards)/[\w/.]*)`", map_of_packages))
    assert len(named) > 20
    assert not {name for name in named if not (ROOT / name).exists()}
