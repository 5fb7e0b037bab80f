"""Settings of Sphinx: ``make docs``. Nothing is fetched while building."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sphinx.application import Sphinx  # noqa: E402
from sphinx.ext.napoleon import GoogleDocstring  # noqa: E402

import pptrace  # noqa: E402

project = "pptrace"
author = "The pptrace authors"
copyright = author
version = release = pptrace.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"pptrace {release}"
html_show_sourcelink = False
html_copy_source = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_mock_imports = ["torch", "nvtx"]  # the pages of the runtime need no torch either
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": True, "show-inheritance": False}
autodoc_preserve_defaults = True
suppress_warnings = ["ref.python"]  # numpy's ArrayLike has bytes in it, which is the name of fields as well

# In signatures and docstrings, what has no page here is named without a link: other packages, and rooms that are no API.
_ROOMS = "|".join(
    (
        *(
            "recognise",
            "ingest",
            "model",
            "workflow",
            "clock",
            "timeline",
            "hang_diagnosis",
            "intervals",
            "slices",
            "marking",
        ),
        *(
            r"analysis\.(?!report|result|whole_run|\w+\.types)",
            r"report\.(?!to_json)",
            r"api\.files",
            r"schedule\.replay_program",
        ),
    )
)
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(numpy|np|npt|pandas|pd|torch|dist|nn|go|os|re|collections|pathlib|click|types|enum|msgspec|contextlib)\..*",
    ),
    (
        r"py:.*",
        r"(Path|FilePath|Batch|Mapping|Sequence|Iterable|Iterator|Callable|Collection|DeviceMesh|Tensor|Program|Int8|Int32|Int64|COMM_ARGS|FigureKind|Sizes|Milliseconds|OpSlack|Predictions|WhatIf|Study|Change|Comparison|tuple\[[~.\w]+)",
    ),
    (r"py:.*", rf"pptrace\.({_ROOMS}).*"),
    (r"py:.*", r"instrument\.(?!session|recorder|mesh|pipeline\.(runtime|p2p)\.).*"),
    (r"py:.*", r"instrument\..*\._\w+"),
    (r"py:mod", r"(pptrace|instrument|dashboards)\..*"),
]


def _prepare(_app: Sphinx, what: str, name: str, obj: object, _options: object, lines: list[str]) -> None:
    """Show what is indented below a paragraph as it is written, and read sections such as ``Args:``.

    Of attributes and properties napoleon would take all before a colon for a type: so it is called here, without them.
    """
    for index in range(len(lines) - 3, -1, -1):
        is_text = bool(lines[index].strip()) and not lines[index].startswith(" ")
        if is_text and not lines[index + 1].strip() and lines[index + 2].startswith("    "):
            lines[index + 1 : index + 1] = ["", "::"]
    if what not in ("attribute", "data", "property"):
        lines[:] = GoogleDocstring(lines, what=what, name=name, obj=obj).lines()


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", _prepare)
