"""What a report cannot tell, and why: a line for everything that is null or left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from pptrace.analysis.result import StepReport
from pptrace.clock import Clock
from pptrace.model.tables import COMPUTE_KINDS, OP_TABLE
from pptrace.recognise.partial.traced_ranks import peers_of
from pptrace.recognise.run import RecognisedRun
from pptrace.timeline.lanes import is_nested

_SHOWN = 8
_CERTAIN = 0.1
"""An uncertainty of the clocks up to this share of the median op is not worth a line."""


def notes(found: RecognisedRun, clock: Clock, steps: Sequence[StepReport]) -> tuple[str, ...]:
    """The lines, those about clocks and missing data first."""
    return (
        *_clocks(found, clock, steps),
        *_absent_ranks(found, steps),
        *_unknown_sizes(found),
        *_lone_ranks(found, steps),
        *_ranks_outside_steps(found, steps),
        *_unknown_bubbles(found, steps),
        *_no_messages(found, steps),
        *_nested_messages(found),
        *dict.fromkeys(str(line) for facts in found.facts.values() for line in facts.get("notes", ())),
        *_nulls(found, steps),
    )


def _clocks(found: RecognisedRun, clock: Clock, steps: Sequence[StepReport]) -> Iterator[str]:
    """How the clocks were related, and how far what compares ranks is to be trusted where ops are not much longer than that."""
    if all(work.missing_device_events for work in found.work.values()):
        return  # launching relates no clocks, and no figure compares them
    yield from clock.warnings
    ops = found.ops[found.ops["kind"].isin(COMPUTE_KINDS)]
    uncertainty = clock.uncertainty_ns or 0
    if steps and ops.empty:
        yield from _clocks_of_steps(uncertainty, steps)
        return
    if not steps or uncertainty <= _CERTAIN * (median := float((ops["end_ns"] - ops["start_ns"]).median())):
        return
    doubt = "no more certain than that"
    if all(step.span_ns is None for step in steps):
        doubt = "null: that is more than half a step"
    yield (
        f"the clocks may be off by ±{uncertainty / 1e3:,.1f} µs where the median op lasts {median / 1e3:,.1f} µs: bubbles, "
        f"waiting and transfers compare ranks and are {doubt}"
    )


def _clocks_of_steps(uncertainty_ns: int, steps: Sequence[StepReport]) -> Iterator[str]:
    """The same for steps without a pipeline."""
    shortest = min(step.end_ns - step.start_ns for step in steps)
    if uncertainty_ns > _CERTAIN * shortest:
        yield (
            f"the clocks may be off by ±{uncertainty_ns / 1e3:,.1f} µs where a step lasts {shortest / 1e3:,.1f} µs: waiting and "
            f"transfers compare ranks and are {'null' if 2 * uncertainty_ns > shortest else 'no more certain than that'}"
        )


def is_plan_of_all(found: RecognisedRun) -> bool:
    """Whether the plan is that of a whole pipeline; a plan found in the order of some of its ranks is not."""
    plan = found.schedule.plan
    return plan is not None and plan.pp >= (found.mesh.pp or 1)


def _absent_ranks(found: RecognisedRun, steps: Sequence[StepReport]) -> Iterator[str]:
    present = set(found.facts)
    absent = sorted({rank for pipeline in found.mesh.pipelines for rank in pipeline} - present)
    num_absent = len(absent)
    if not absent and found.mesh.num_ranks > len(present):  # counted: a file may claim any number of ranks
        num_absent = found.mesh.num_ranks - sum(0 <= rank < found.mesh.num_ranks for rank in present)
        absent = list(islice((rank for rank in range(found.mesh.num_ranks) if rank not in present), _SHOWN))
    if not absent:
        return
    line = f"no trace of rank {_listed(absent, num_absent)} (of {found.mesh.num_ranks})"
    if not steps:
        yield line
    elif len(present) == 1:
        yield f"{line}: windows of steps, waits and bubbles cannot take in what those ranks did"
    else:
        yield f"{line}: windows and waits are without it, and bubbles that depend on it are null"


def _unknown_sizes(found: RecognisedRun) -> Iterator[str]:
    """Why the sizes of a mesh are null though its ranks communicate."""
    mesh, comms = found.mesh, found.comms
    if comms.empty or (mesh.pp or mesh.dp or mesh.tp or mesh.cp) or mesh.num_ranks < 2:
        return
    if (comms["axis"] == "unknown").all() and (comms["group_size"] < 1).all():
        yield (
            "null in this report: mesh (the calls name no process group: a profiler that begins before "
            "init_process_group records none; let pptrace run watch the groups, without --no-hooks, or begin the profiler later)"
        )


def _lone_ranks(found: RecognisedRun, steps: Sequence[StepReport]) -> Iterator[str]:
    """For ranks alone in their pipeline: what their figures are of, and which other rank's trace would tell the rest."""
    alone = {
        rank
        for pipeline in found.mesh.pipelines
        if len(present := set(pipeline) & set(found.facts)) == 1
        for rank in present
        if found.mesh.lacks_ranks(rank, found.facts)
    }
    shown = sorted({rank.rank for step in steps for rank in step.ranks if rank.rank in alone})
    if not shown:
        return
    whose = f"rank {_listed(shown)}"
    yield (
        f"the windows of steps are those of {whose} alone, from its first op to its last, and the pipeline's may be longer; in "
        "them not_compute_ns is waiting and exposed transfer together, and bubble_low_ns and bubble_high_ns bound the bubble"
    )
    for rank in shown[:_SHOWN]:
        if peers := _peers(found, rank):
            yield f"rank {rank} exchanges messages with {' and '.join(peers)}: their traces tell its waiting from transfer"


def _peers(found: RecognisedRun, rank: int) -> list[str]:
    """Who is at the other ends of a rank's messages: global ranks where they are known, else pipeline ranks."""
    mesh, messages = found.mesh, found.comms[(found.comms["rank"] == rank) & (found.comms["axis"] == "pp")]
    told = sorted({int(peer) for peer in messages.loc[messages["kind"].isin(("send", "recv")), "peer"] if peer >= 0})
    if told:
        return [f"rank {peer}" for peer in told]
    plan, place = found.schedule.plan, mesh.pp_rank(rank)
    candidates = found.schedule.candidates
    if plan is not None and place is not None and place < plan.pp:
        places = sorted(peers_of(plan, place))
    elif candidates and mesh.pp is not None and place is not None and {c.num_chunks for c in candidates} == {1}:
        places = [other for other in (place - 1, place + 1) if 0 <= other < mesh.pp]
    else:
        return []
    pipeline = () if mesh.known_pp_ranks else mesh.pipeline_of(rank)
    return [f"rank {pipeline[other]}" if other < len(pipeline) else f"pipeline rank {other}" for other in places]


_HALVES = {"F": 1, "B": 1, "I": 1, "OVERLAP_F_B": 2}


def _ranks_outside_steps(found: RecognisedRun, steps: Sequence[StepReport]) -> Iterator[str]:
    """Ranks whose trace has no op of a step, or fewer than the others: cut off, or without marks.

    Forwards and backwards are counted, of which every rank of a pipeline has the same number: a pair run as one op is two,
    and a weight gradient of its own is none.
    """
    compute = found.ops[found.ops["kind"].isin(_HALVES) & (found.ops["microbatch"] >= 0)]
    halves = compute["kind"].map(_HALVES)
    counts = halves.groupby([compute["step"], compute["rank"]]).sum().to_dict()
    short: dict[str, list[int]] = {}
    for step in steps:
        for pipeline in found.mesh.pipelines:
            most = max((counts.get((step.step, rank), 0) for rank in pipeline), default=0)
            for rank in pipeline:
                count = counts.get((step.step, rank), 0)
                if rank in found.facts and count < most:
                    held = f"{count} of {most}" if count else "no"
                    short.setdefault(f"rank {rank}: its trace has {held} ops", []).append(step.step)
    for what, numbers in short.items():
        yield f"{what} of step {_listed(numbers)}: the numbers of that step are without them"


def _ranks_without_bubble(steps: Sequence[StepReport]) -> list[int]:
    return sorted(
        {rank.rank for step in steps for rank in step.ranks if rank.bubble_ns is None and step.span_ns is not None}
    )


def _unknown_bubbles(found: RecognisedRun, steps: Sequence[StepReport]) -> Iterator[str]:
    ranks = _ranks_without_bubble(steps)
    if not ranks:
        return
    why = "the other side of their messages is not in the traces"
    lacking = found.comms[found.comms["rank"].isin(ranks) & (found.comms["match"] < 0)]
    groups_told = any(getattr(found.mesh, axis, None) is not None for axis in lacking["axis"].unique())
    if found.framework == OP_TABLE and not groups_told and not lacking["kind"].isin(("send", "recv")).any():
        why = "nothing tells which ranks join in a collective (add a column match, or dp_rank, tp_rank, … to the table)"
    waits = (
        f"; so are comms[].wait_ns, hidden_ns, exposed_ns and overlap_ratio of {_listed(lone)}"
        if (lone := _lone(steps))
        else ""
    )
    yield (
        f"bubble_ns and exposed_comm_ns of rank {_listed(ranks)} are null: {why}, so that waiting cannot be told from transfer"
        f"{waits}"
    )


def _lone(steps: Sequence[StepReport]) -> list[str]:
    """Axis and kind of the communication whose waiting is not known."""
    comms = (comm for step in steps for rank in step.ranks for comm in rank.comms)
    return sorted({f"{comm.axis} {comm.kind}" for comm in comms if comm.wait_ns is None and comm.total_ns is not None})


def _no_messages(found: RecognisedRun, steps: Sequence[StepReport]) -> Iterator[str]:
    """A pipeline of several ranks whose traces show no message between stages."""
    messages = found.comms["kind"].isin(("send", "recv"))
    is_known = any(rank.bubble_ns is not None for step in steps for rank in step.ranks)
    if is_known and not messages.any() and any(len(pipeline) > 1 for pipeline in found.mesh.pipelines):
        yield "no messages between stages in these traces: transfers cannot be told from waiting, and count as bubble"


def _nested_messages(found: RecognisedRun) -> Iterator[str]:
    """What of a table's communication is taken out of compute because nothing says that it ran beside."""
    if found.framework != OP_TABLE:
        return
    ops = dict(iter(found.ops[found.ops["kind"].isin(COMPUTE_KINDS)].groupby("rank")))
    comms = found.comms[found.comms["end_ns"] > found.comms["start_ns"]]
    count = sum(
        int(is_nested(mine, ops[rank], is_table=True).sum()) for rank, mine in comms.groupby("rank") if rank in ops
    )
    if count:
        yield (
            f"communication inside ops of host-clock tables is taken out of compute ({count} rows): say clock=device in both "
            "where it ran beside"
        )


def _unseen_devices(found: RecognisedRun) -> Iterator[str]:
    """Where the device's work is not in the traces: nothing but the host worked, or it was not recorded."""
    lacking = {
        rank: work.missing_device_events for rank, work in sorted(found.work.items()) if work.missing_device_events
    }
    if lacking:
        whose = "" if len(lacking) == len(found.work) else f" of rank {_listed(list(lacking))}"
        yield (
            f"no device events{whose}, though the run computes on devices ({next(iter(lacking.values()))}): times are those of "
            "launching, and compute, bubbles, transfers and the waterfall are null; record with activities=[CPU, CUDA]"
        )
    elif not any(len(work) for work in found.work.values()):
        on_device = len(found.ops) and (found.ops["clock"] == "device").all()
        what = "times are those of the tables, which say device" if on_device else "times are host ranges"
        yield f"no device events in these traces: {what}, and the device breakdown is null"


def _nulls(found: RecognisedRun, steps: Sequence[StepReport]) -> Iterator[str]:
    yield from _unseen_devices(found)
    if not steps and found.ops["kind"].isin(COMPUTE_KINDS).any():
        yield (
            "pipeline steps, phases and bubbles are null: the forwards and backwards found are of a pipeline that these traces "
            "do not tell; give the traces of all of its ranks"
        )
        return
    if not steps:
        marked = (
            "the marks in these traces are of steps alone" if len(found.ops) else "no marks of pptrace, no known labels"
        )
        yield (
            f"no forward or backward of a microbatch recognised ({marked}): pipeline steps, phases and bubbles cannot be "
            "given; see the README for the runtimes that are recognised"
        )
        return
    if not any(step.has_pipeline for step in steps):
        yield (
            "no forward or backward of a microbatch recognised: no pipeline in these traces, so that bubble ratios, phases "
            "and the waterfall are null; bubble_ns of a rank is what of its step is neither compute nor exposed communication"
        )
        yield f"null in this report: {', '.join(_null_fields(found, steps))}"
        return
    plan = found.schedule.plan
    is_partial = plan is not None and not is_plan_of_all(found)
    if is_partial and plan is not None:
        yield (
            f"ideal_ratio, ideal_share and waterfall_ns are null: the plan found is of {plan.pp} of the {found.mesh.pp} ranks of "
            "a pipeline"
        )
    elif plan is not None and (other := [step.step for step in steps if step.bubble.ideal_ratio is None]):
        yield f"ideal_ratio and ideal_share of step {_listed(other)} are null: the step has other ops than the plan"
    if not is_partial and any(step.bubble.waterfall_ns is None and step.span_ns is not None for step in steps):
        ideal = "ideal_ratio, ideal_share and " if plan is None else ""
        what = "there is no plan" if plan is None else "a step lacks ops of the plan"
        yield f"{ideal}waterfall_ns {'are' if ideal else 'is'} null where {what}"
    yield f"null in this report: {', '.join(_null_fields(found, steps))}"


def _null_fields(found: RecognisedRun, steps: Sequence[StepReport]) -> Iterator[str]:
    """The fields that are null, each with its reason."""
    comms = [comm for step in steps for rank in step.ranks for comm in rank.comms]
    if any(step.bubble.waterfall_ns is not None for step in steps):
        yield "waterfall_ns.host (launching is not told apart)"
    if found.memory.empty:
        yield "peak_memory_bytes (no memory events)"
    if any(comm.bytes is None for comm in comms):
        yield "comms[].bytes and bandwidths (the calls do not tell their sizes)"
    if (lone := _lone(steps)) and not _ranks_without_bubble(steps):
        yield (
            f"comms[].wait_ns, hidden_ns, exposed_ns and overlap_ratio of {_listed(lone)} (other members of the calls have no "
            "trace, or which they are is not told)"
        )
    yield "stragglers (not computed by this version)"


def _listed(numbers: Sequence[object], count: int | None = None) -> str:
    """The first few; ``count`` is how many there are, where ``numbers`` are not all."""
    shown, total = ", ".join(map(str, numbers[:_SHOWN])), len(numbers) if count is None else count
    return shown if total <= _SHOWN else f"{shown} and {total - _SHOWN} more"
