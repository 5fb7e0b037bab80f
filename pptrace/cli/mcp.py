"""``pptrace mcp``: answer an assistant about traces."""

from __future__ import annotations

from pathlib import Path

import click

from pptrace.cli.options import INPUT_PATH
from pptrace.errors import PptraceError


@click.command(name="mcp", short_help="Answer an assistant about traces.")
@click.argument("paths", nargs=-1, required=True, type=INPUT_PATH)
def command(paths: tuple[Path, ...]) -> None:
    """Let an assistant ask about PATHS through the Model Context Protocol on stdin and stdout.

    Its tools are report, findings, evidence, tables, table and whatif; they only read, and only PATHS: trace files, a directory
    with one trace per rank, or a run directory of `pptrace run`. Assistants start this themselves: see the documentation. It
    needs the extra: pip install 'pptrace[mcp]'.
    """
    from pptrace.ingest import require_path

    try:
        from dashboards.assistant.server import make_server
    except ImportError as err:
        if (err.name or "").split(".")[0] not in ("mcp", "mcp_types", "pydantic"):
            raise
        raise PptraceError(
            "pptrace mcp needs the Model Context Protocol's SDK, version 2 or later; install it with pip install 'pptrace[mcp]'"
        ) from None
    for path in paths:
        require_path(path)
    make_server(paths).run("stdio")
