"""Load a run: from the PATHs of a user to its analysis, for the command line and the dashboard."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from msgspec.structs import replace

from pptrace.analysis.findings.verdict import with_verdict
from pptrace.analysis.recording import recorded_figures, with_recording
from pptrace.analysis.shared_devices import SharedDevice
from pptrace.hang_diagnosis.calls import hang_of_run
from pptrace.ingest import OnProgress, ReadResult, open_inputs, read_each
from pptrace.ingest.common.byte_source import first_bytes, num_text_bytes
from pptrace.ingest.inputs.resolve import InputFile, OpenedInputs
from pptrace.ingest.sniff import sniff_flight
from pptrace.model.traces import InputFormat, Trace
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.workflow.analyse import Analysis, analyse_ranks
from pptrace.workflow.rank_store import RankStore, recognise_corrected, recognise_trace
from pptrace.workflow.unrecorded import undo_recording

if TYPE_CHECKING:
    from pptrace.workflow.dask_engine import DaskEngine


_SMALL_BYTES = 32 << 20
"""Text of all files up to which their traces are kept until they are corrected."""


def load(
    paths: Sequence[Path],
    schedule: str | None = None,
    step: int | None = None,
    jobs: int | None = 1,
    on_progress: OnProgress | None = None,
    cache: bool = True,
    engine: DaskEngine | None = None,
    as_recorded: bool = False,
) -> Analysis:
    """Read and analyse trace files, a directory of them, or a run directory.

    What recording cost is taken out, and the files are read once more as they would have been without it, where that makes a
    difference; not ``as_recorded``, and not of a run that hung.

    ``jobs`` is how many processes read, and explain the steps (None: one per core). Where they cannot be forked, those that read
    are spawned, so a script that asks for more than one must be guarded by ``if __name__ == "__main__"``. With ``cache``, what is
    recognised in large files is kept on disk, and unchanged files are not read again (:mod:`pptrace.ingest.job.disk_cache`). With
    an ``engine`` its workers read and recognise instead.

    Raises:
        PptraceError: nothing can be read, or ``schedule`` or ``step`` do not fit; the message is one line.
    """
    request = _Request(tuple(paths), open_inputs(paths), schedule, step, jobs)
    read_files = None if engine is None else engine.read_files
    num_bytes = sum(num_text_bytes(file.path) for file in request.inputs.files)
    traces = _SmallTraces() if engine is None and num_bytes <= _SMALL_BYTES else None
    recognise = recognise_trace if traces is None else traces.recognise
    store: Any = RankStore() if cache else None
    read = [read_each(request.inputs, recognise, jobs, on_progress, store, read_files)]
    recordings = {rank.number: rank.recording for rank in read[0].traces}
    is_undone = not as_recorded and any(recording.cost.is_known for recording in recordings.values())
    if traces is not None and not is_undone:
        traces.by_path.clear()  # a large table may be a small file
    analysis = _analyse_read(request, read, is_brief=is_undone)
    why_recorded = _why_recorded(request, analysis, as_recorded)
    recording, corrections = undo_recording(analysis, recordings, why_recorded)
    del recordings
    if corrections is None:
        analysis = analysis.answered()
        report = analysis.report
        with_cost = replace(report, recording=recording) if why_recorded else with_recording(report, recording)
        return analysis.with_report(with_cost)
    recorded, device = recorded_figures(analysis.report), analysis.report.device
    sharing = analysis.sharing  # kernels take turns as they were recorded
    del analysis
    correct = partial(recognise_corrected, corrections)
    store = RankStore(corrections=corrections.digest) if cache else None
    if traces is not None:
        traces.correct, traces.cache, store = correct, store, traces
    analysis = _analyse_read(request, [read_each(request.inputs, correct, jobs, None, store, read_files)], sharing)
    # What is of whole traces is of the recordings.
    report = with_recording(replace(analysis.report, device=device), replace(recording, as_recorded=recorded))
    return dataclasses.replace(analysis, report=report, corrections=corrections)


def _why_recorded(request: _Request, analysis: Analysis, as_recorded: bool) -> str:
    """Give the reason for which figures stay those of the recording; "" of a run from which its recording is taken out."""
    if as_recorded:
        return "the recorded figures are asked for"
    if analysis.report.hang is not None:
        return "the run hung"
    if request.inputs.dumps:
        return "calls are completed from flight-recorder dumps, whose times have what recording cost in them"
    return ""


class _SmallTraces(Struct):
    """The traces of small files, which are not read again to be corrected: a store of ranks that are recognised from them when
    they are asked for, unless the ``cache`` has them.
    """

    by_path: dict[str, list[Trace]] = field(default_factory=dict)
    correct: Callable[[Trace], RecognisedRank] = recognise_trace
    cache: RankStore | None = None

    def recognise(self, trace: Trace) -> RecognisedRank:
        """Recognise a trace, and remember it."""
        self.by_path.setdefault(trace.path, []).append(trace)
        return recognise_trace(trace)

    def peek(self, file: InputFile) -> tuple[RecognisedRank, ...] | None:
        """The ranks of a file that the cache has."""
        return None if self.cache is None else self.cache.peek(file)

    def get(self, file: InputFile) -> tuple[RecognisedRank, ...] | None:
        """The ranks of a file; None where its traces are not there: it could not be read, or the cache had it."""
        cached, traces = None if self.cache is None else self.cache.get(file), self.by_path.get(str(file.path))
        if cached is not None or traces is None:
            return cached
        ranks = tuple(map(self.correct, traces))
        self.put(file, ranks)
        return ranks

    def put(self, file: InputFile, ranks: Sequence[RecognisedRank]) -> None:
        """Put the ranks of a file into the cache."""
        if self.cache is not None:
            self.cache.put(file, ranks)


class _Request(Struct, frozen=True):
    """The paths and options of a user, with the files that were found at the paths."""

    paths: tuple[Path, ...]
    inputs: OpenedInputs
    schedule: str | None
    step: int | None
    jobs: int | None = 1


def _analyse_read(
    request: _Request,
    read: list[ReadResult[RecognisedRank]],
    sharing: tuple[SharedDevice, ...] | None = None,
    is_brief: bool = False,
) -> Analysis:
    """Analyse what was read, which is taken out of ``read`` so that the analysis has the ranks alone and lets go of them; the
    others as :func:`analyse_ranks` takes them.
    """
    run = request.inputs.run or {}
    result = read.pop()
    ranks, hang = result.traces, _hang(request)
    dump_warnings: Sequence[str] = ()
    if request.inputs.dumps or hang is not None:  # what reads dumps is imported for such runs alone
        from pptrace.workflow.complete_calls import complete_calls

        ranks, dump_warnings = complete_calls(ranks, request.inputs.dumps, has_hung=hang is not None)
    warnings = [*result.warnings, *dump_warnings]
    if run.get("status") not in (None, "ok"):  # of the ranks that did not end well their traces warn
        warnings.append(f"the run ended as {run['status']!r}; what was recorded until then is analysed")
    world_size = run.get("world_size")
    num_ranks = world_size if isinstance(world_size, int) else None
    alone = [ranks]
    del result, ranks
    # The ranks are an argument of their own, and no part of a tuple, which would keep them for the whole call.
    analysis = analyse_ranks(
        alone.pop(), request.schedule, request.step, num_ranks, warnings, request.jobs, sharing, is_brief
    )
    if hang is not None:
        answered = analysis.answered()
        analysis = answered.with_report(with_verdict(replace(answered.report, hang=hang)))
    return dataclasses.replace(analysis, run=run)


def _hang(request: _Request) -> Mapping[str, Any] | None:
    """The hang verdict, from the flight-recorder dumps among the inputs, else the one in run.json."""
    inputs = request.inputs
    files = [file.path for file in inputs.files if file.format is InputFormat.OPLOG]
    dumps = [*inputs.dumps, *(path for path in files if sniff_flight(first_bytes(path)))]
    if not dumps:
        return hang_of_run(inputs.run or {})
    from pptrace.workflow.find_hang import hang_of_dumps  # what makes a verdict is imported for dumps alone

    return hang_of_dumps(dumps, is_all=all(Path(path).is_dir() for path in request.paths))
