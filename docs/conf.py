"""Settings of Sphinx: ``make docs``. Nothing is fetched while building."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pptrace  # noqa: E402

project = "pptrace"
author = "The pptrace authors"
copyright = author  # noqa: A001
version = release = pptrace.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
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
autodoc_default_options = {"members": True, "show-inheritance": False}
autodoc_typehints = "signature"
autodoc_type_aliases = {}
napoleon_use_rtype = False

# Types of other packages, and of rooms that have no page here, are named in signatures without a link.
nitpick_ignore_regex = [
    (r"py:.*", r"(numpy|np|npt|pandas|pd|torch|dist|nn|collections|pathlib|click|types|enum|contextlib)\..*"),
    (r"py:.*", r"(Path|Mapping|Sequence|Iterable|Iterator|Callable|Collection|Tensor|Int8|Int32|Int64|Any|Self)"),
    (r"py:mod", r"(pptrace|instrument|dashboards).*"),
]
