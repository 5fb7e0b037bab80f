"""Rights of a browser over the answers of the dashboard: headers of every one of them, and pages of text alone."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from hashlib import sha256

from flask import Response

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_STYLE = """:root { color-scheme: light dark; }
body { font: 15px/1.5 "Segoe UI", Roboto, "Helvetica Neue", Arial, "Liberation Sans", sans-serif; }
main { max-width: 34rem; margin: 18vh auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; }
input, button { font: inherit; padding: 5px 10px; }
input { width: 20rem; max-width: 60%; }"""


def of_pages(script_hashes: Iterable[str]) -> str:
    """The content security policy of the app's pages: scripts are files of this server, or inline ones of these hashes.

    Plotly and Dash's controls set styles of single elements, so inline styles are allowed; a style runs nothing, and what it
    names can be loaded from this server alone.
    """
    return "; ".join(
        (
            "default-src 'none'",
            " ".join(("script-src 'self'", *script_hashes)),
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data: blob:",
            "font-src 'self' data:",
            "connect-src 'self'",
            _NO_OTHERS,
        )
    )


_NO_OTHERS = "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
_STYLE_HASH = b64encode(sha256(_STYLE.encode()).digest()).decode()
TEXT_PAGE = f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; {_NO_OTHERS}"
"""The policy of a page of text: nothing is loaded and nothing runs."""
FILE = f"default-src 'none'; sandbox; {_NO_OTHERS}"
"""The policy of a file: it is saved, and shown as a page it could do nothing."""


def text_page(body: str, status: int = 200, head: str = "") -> Response:
    """A page without scripts. ``body`` and ``head`` are markup."""
    page = (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>pptrace</title>{head}'
        f"<style>{_STYLE}</style></head><body><main>{body}</main></body></html>"
    )
    headers = {"Content-Security-Policy": TEXT_PAGE, "Cache-Control": "no-store"}
    return Response(page, status, headers, mimetype="text/html")
