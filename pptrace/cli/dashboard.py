"""``pptrace dashboard``: show traces in a browser."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from pptrace.cli.options import INPUT_PATH, WHOLE
from pptrace.errors import UsageError


@click.command(name="dashboard", short_help="Look at traces in a browser.")
@click.argument("paths", nargs=-1, required=True, type=INPUT_PATH)
@click.option("--compare", "other", type=INPUT_PATH, help="A second run to compare with: B, PATHS being A.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8050, show_default=True, type=WHOLE, help="Port to listen on; 0 takes a free one.")
@click.option(
    "--token",
    envvar="PPTRACE_TOKEN",
    show_envvar=True,
    metavar="TEXT|auto",
    help="Answer only who knows this token; auto makes one, which the printed address has.",
)
@click.option("--metrics", is_flag=True, help="Answer Prometheus at /metrics with the figures of the report.")
@click.option("--as-recorded", is_flag=True, help="Figures of the recording: what it cost is not taken out.")
@click.option("--no-open", is_flag=True, help="Do not open a browser.")
def command(
    paths: tuple[Path, ...],
    other: Path | None,
    host: str,
    port: int,
    token: str | None,
    metrics: bool,
    as_recorded: bool,
    no_open: bool,
) -> None:
    """Show PATHS in a browser: where the step went, every op in time, and what would get it back.

    PATHS are trace files, a directory with one trace per rank, or a run directory of `pptrace run`. A damaged or empty
    directory opens too, and the page says what is missing.
    """
    from dashboards.access import address_with, secret_of
    from dashboards.app import begin_reading, create_app
    from dashboards.serve import bind, open_browser, reach_of, serve, url_of
    from pptrace.ingest import require_path
    from pptrace.memory import return_large_memory

    return_large_memory()
    secret = secret_of(token)
    for path in (*paths, *([] if other is None else [other])):
        require_path(path)
    if other is not None:
        _require_single((*paths, other))
    listener = bind(host, port)
    app = create_app(paths, [host], other, secret, metrics, as_recorded)
    url = address_with(url_of(listener), secret if token == "auto" else None)
    with suppress(KeyboardInterrupt):
        click.echo(f"pptrace dashboard at {url} (Ctrl-C ends it)")
        if warning := reach_of(listener, has_secret=secret is not None):
            click.echo(f"pptrace: {warning}", err=True)
        if not no_open:
            open_browser(url_of(listener))  # without the token: others can see what a process was started with
        begin_reading(app)
        serve(app, listener)


def _require_single(paths: Sequence[Path]) -> None:
    """Refuse directories of several runs, of which the pages would show one job of too many ranks, or none."""
    from pptrace.ingest.inputs.several import runs_at

    for path in paths:
        if (number := len(runs_at(path))) > 1:
            raise UsageError(
                f"{path}: holds {number} runs; --compare compares one run with another; give one of them, or compare all with "
                "pptrace compare"
            )
