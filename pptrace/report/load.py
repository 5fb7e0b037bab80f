"""From the PATHs that a user gives to an analysis: what the command line and the dashboard both begin with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pptrace.analysis.analyse import Analysis, analyse_ranks
from pptrace.ingest import Progress, open_inputs, read_each
from pptrace.ingest.flight_dump import read_dumps
from pptrace.recognise.dumps import with_dumps
from pptrace.report.cached import RankStore, find_in_rank


def load(
    paths: Sequence[Path],
    schedule: str | None = None,
    step: int | None = None,
    jobs: int | None = 1,
    progress: Progress | None = None,
    cache: bool = True,
) -> Analysis:
    """Read and analyse trace files, a directory of them, or a run directory.

    ``jobs`` is how many processes read (None: one per core). Where they cannot be forked they are spawned, so a script that
    asks for more than one must be guarded by ``if __name__ == "__main__"``. With ``cache``, what is found in large files is
    kept on disk, and not looked for again in files that have not changed (:mod:`pptrace.ingest.cache`).

    Raises:
        PptraceError: nothing can be read, or ``schedule`` or ``step`` do not fit; the message is one line.
    """
    inputs = open_inputs(paths)
    result = read_each(inputs, find_in_rank, jobs, progress, RankStore() if cache else None)
    run = inputs.run or {}
    world_size = run.get("world_size")
    dumps, lost = read_dumps(inputs.dumps)
    ranks, told = with_dumps(result.traces, dumps)
    return analyse_ranks(
        ranks,
        schedule,
        step,
        num_ranks=world_size if isinstance(world_size, int) else None,
        warnings=(*result.warnings, *lost, *told, *_run_warnings(run)),
    )


def _run_warnings(run: Mapping[str, Any]) -> list[str]:
    """What run.json says of the run as a whole; its ranks have lines of their own."""
    if run.get("status") in (None, "ok"):
        return []
    return [f"the run ended as {run['status']!r}; what was recorded until then is analysed"]
