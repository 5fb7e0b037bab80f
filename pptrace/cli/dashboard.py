"""``pptrace dashboard``: show traces in a browser."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click


@click.command(name="dashboard", short_help="Look at traces in a browser.")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8050, show_default=True, type=int, help="Port to listen on; 0 takes a free one.")
@click.option("--no-open", is_flag=True, help="Do not open a browser.")
def command(paths: tuple[Path, ...], host: str, port: int, no_open: bool) -> None:
    """Show PATHS in a browser: an overview and a timeline of every step.

    PATHS are trace files, a directory with one trace per rank, or a run directory of `pptrace run`. A damaged or empty
    directory opens too, and the page says what is missing.
    """
    from dashboards.app import create_app
    from dashboards.serve import bind, open_browser, serve, url_of
    from pptrace.ingest import require_path

    for path in paths:
        require_path(path)
    listener = bind(host, port)
    app = create_app(paths, [host])
    url = url_of(listener)
    with suppress(KeyboardInterrupt):
        click.echo(f"pptrace dashboard at {url} (Ctrl-C ends it)")
        if not no_open:
            open_browser(url)
        serve(app, listener)
