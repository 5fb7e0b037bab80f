"""The page of a run that hung: who is to blame, who waits for whom, and in which call."""

from __future__ import annotations

from dash import html

from dashboards.answers import Answers
from dashboards.components import Node, hang_panel, lines, panel
from dashboards.exports import picture_files, table_files
from dashboards.parts import empty, guarded
from dashboards.store import Loaded
from pptrace.hang_diagnosis.calls import rank_text

_ADVICE = (
    "Torch writes dumps of its flight recorder with TORCH_FR_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1; pptrace run "
    "watches for hangs by itself and keeps its verdict in the run directory."
)


def layout(_loaded: Loaded, answers: Answers, *_: object) -> Node:
    return html.Div(guarded(lambda: body(answers), "Nothing is known of a hang", "no-hang"), id="hang-body")


def body(answers: Answers) -> list[Node]:
    """The verdict with its table and graph; without one, the reason."""
    found = answers.hang()
    seen = (
        f"{len(found.seen_ranks)} ranks were seen: {rank_text(found.seen_ranks)}"
        if found.seen_ranks
        else "No rank was seen."
    )
    warnings = [panel("Files that could not be read", lines(found.warnings, "hang-warnings"))] if found.warnings else []
    if found.result.hang is None:
        return [empty("No run that hung", found.reason, "no-hang", seen, _ADVICE), *warnings]
    verdict = hang_panel(found.result.hang)
    verdict.children[0] = html.Div(
        [html.H2("The run hung"), table_files("hang"), picture_files("hang-graph")],
        className="panel-head",
    )
    return [verdict, html.P(seen, className="note"), *warnings]
