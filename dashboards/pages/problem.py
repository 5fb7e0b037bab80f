"""The page shown when there is nothing to analyse: the error, the run, and its files."""

from __future__ import annotations

from collections.abc import Sequence

from dash import dcc, html

from dashboards.components import Node, hang_panel, panel, table
from dashboards.store import READABLE, InputFile, Loaded
from pptrace.hang_diagnosis.calls import hang_of_run
from pptrace.ingest.inputs.resolve import ranks_of_run
from pptrace.live_records.frames import SUFFIX
from pptrace.model.units import num_bytes
from pptrace.model.wording import counted

_FACTS = (
    ("status", "Status"),
    ("exit_code", "Exit code"),
    ("command", "Command"),
    ("started_at", "Started"),
    ("ended_at", "Ended"),
    ("profiler", "Profiler"),
    ("world_size", "Ranks"),
    ("host", "Host"),
)
_ADVICE = {
    "running": "run.json says the run is still going on, or its launcher was killed. Reload this page when it has ended.",
    "failed": "The run failed: the ranks' errors are below. Fix the script and run it again.",
    "interrupted": "The run was interrupted before its traces were written.",
    "timeout": "The run was ended by its time limit before its traces were written.",
}


def no_page(path: str) -> Node:
    """The page of an address that has none."""
    overview = dcc.Link("the overview", href="/")
    text = html.P([f"There is no page {path[:80]}. See ", overview, "; others are in the line above."], id="problem")
    return html.Section([html.H2("No such page"), text], className="panel problem")


def layout(loaded: Loaded) -> Node:
    """The page for a load that failed."""
    has_steps = any(file.name.endswith(SUFFIX) for file in loaded.files)
    advice = _ADVICE.get(str(loaded.run.get("status"))) or _advice_on(loaded.files)
    if has_steps and loaded.run.get("profiler") == "none":
        advice = "It was started with --profiler none: there will be no traces."
    live = (
        [html.P(["Its ranks write live records: ", dcc.Link("its last steps", href="/live"), "."], id="has-live")]
        if has_steps
        else []
    )
    parts = [
        html.Section(
            [
                html.H2("Steps, and no traces" if has_steps else "Nothing to analyse here"),
                *live,
                html.P(loaded.error, id="problem", className="error"),
                html.P(advice),
            ],
            className="panel problem",
        )
    ]
    if (hang := hang_of_run(loaded.run)) is not None:
        parts.insert(0, hang_panel(hang))
    columns = []
    if loaded.run:
        known = [[label, _text(loaded.run[name])] for name, label in _FACTS if loaded.run.get(name) is not None]
        columns.append(panel("The run, from run.json", table(("", ""), known, text_columns=2, id="run-facts")))
    columns.append(_files_panel(loaded.files))
    if not loaded.run:
        columns.append(_openable_panel())
    ranks = ranks_of_run(loaded.run)
    if ranks:
        names = ("rank", "status", "trace", "error", "note")
        rows = [[_text(entry.get(name)) for name in names] for entry in ranks]
        content = table([*map(str.capitalize, names)], rows, text_columns=len(names), id="run-ranks")
        parts.append(panel("Ranks", content))
    return html.Div([*parts, html.Div(columns, className="columns ragged")])


def _advice_on(files: Sequence[InputFile]) -> str:
    broken = [file.name for file in files if file.problem not in ("", READABLE)]
    if not broken or any(file.problem == READABLE for file in files):  # else what can be read is the problem
        return f"Reload this page when {'this is mended' if files else 'the files exist'}."
    more = f" and {counted(len(broken) - 1, 'more file')}" if len(broken) > 1 else ""
    return f"{broken[0]}{more} cannot be read: why is below. Copy or record anew what is broken, and reload this page."


_OPENABLE = (
    ("a run directory", "pptrace run -n 4 train.py makes one, of any script that torchrun starts"),
    ("traces of torch.profiler", "a directory with one .json or .json.gz per rank (export_chrome_trace)"),
    ("reports of Nsight Systems", ".nsys-rep, .qdrep or .sqlite, one or several"),
    ("tables of ops", "CSV, Parquet or JSON rows: rank, kind, start and end of every op"),
    ("flight-recorder dumps", "of a run that hangs: see the page Hang"),
)


def _openable_panel() -> Node:
    """A list of what the command takes, and the page that needs no trace."""
    schedules = html.P(["Without a trace, ", dcc.Link("Schedules", href="/schedules"), " draws any schedule on paper."])
    content = table(("", ""), _OPENABLE, text_columns=2, id="openable")
    return panel("What can be opened", content, schedules, note="pptrace dashboard PATH…")


def _files_panel(files: tuple[InputFile, ...]) -> Node:
    rows = [[file.name, file.problem or "–", num_bytes(file.num_bytes)] for file in files]
    content = (
        table(("File", "Problem", "Size"), rows, text_columns=2, id="files")
        if rows
        else html.P("None.", className="empty")
    )
    return panel("Files found", content)


def _text(value: object) -> str:
    if value is None or value == "":
        return "–"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
