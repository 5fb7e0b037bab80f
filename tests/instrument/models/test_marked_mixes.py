"""No unmarked communication: whatever parallel ranks say to each other lies in one mark that tells it right, and is predicted.

Read from profiled runs, operation by operation, of every two axes together; with PPTRACE_ALL set, of every mesh
within eight processes. :mod:`tests.instrument.models.test_mixes` watches the calls of all variants of all of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from instrument.context.shard import KeyExchange, Layout
from instrument.mesh import MeshShape
from instrument.models.gpt_config import Recompute
from instrument.optim.clipping import OptimizerSync
from pptrace.marks import Axis, Collective, CollectiveMark, ExchangeMark
from pptrace.sizes.step import StepVolume
from pptrace.sizes.transformer import total
from tests.instrument.models.cases.call_watch import DESCRIPTIONS, CommunicationMark, links_of, volume_of
from tests.instrument.models.cases.marked import GROUP, Event, Marked, marked, steps_of, train_profiled
from tests.instrument.models.cases.mixes import SIZES, Mix, facts_of
from tests.support.extent import ALL
from tests.support.pool import Pool

KINDS = {
    "c10d::allreduce_": Collective.ALL_REDUCE,
    "c10d::_allgather_base_": Collective.ALL_GATHER,
    "c10d::_reduce_scatter_base_": Collective.REDUCE_SCATTER,
    "c10d::alltoall_base_": Collective.ALL_TO_ALL,
    "c10d::broadcast_": Collective.BROADCAST,
}
GLOO = {  # gloo reduce-scatters by an all-reduce
    Collective.ALL_REDUCE: "gloo:all_reduce",
    Collective.REDUCE_SCATTER: "gloo:all_reduce",
    Collective.ALL_GATHER: "gloo:all_gather",
    Collective.ALL_TO_ALL: "gloo:all_to_all",
    Collective.BROADCAST: "gloo:broadcast",
}

VALIDATED = OptimizerSync.POST_VALIDATION
MIXES = {
    "gqa-full-dropout-validated": Mix(
        pp=2, tp=2, kv_heads=1, ahead=2, recompute=Recompute.FULL, dropout=0.1, clip=1e6, sync=VALIDATED
    ),
    "rolled-back": Mix(pp=2, tp=2, sequence=True, clip=0.3, sync=VALIDATED),
    "encoder": Mix(pp=2, tp=2, sequence=True, encoder=(1, 8), tied=False, kv_heads=1, ahead=2),
    "tp-sp-overlap-buckets": Mix(tp=2, dp=2, sequence=True, overlap=True, bucket_bytes=1000),
    "tp-ulysses-selective-zero1-clip": Mix(
        tp=2, cp=2, sequence=True, ulysses=2, recompute=Recompute.SELECTIVE, zero=1, bucket_bytes=1000, clip=0.3
    ),
    "ring-selective-zero3": Mix(cp=2, dp=2, zero=3, recompute=Recompute.SELECTIVE),
    "gathered-selective-gqa": replace(
        Mix(pp=2, cp=2, schedule="interleaved-1f1b", recompute=Recompute.SELECTIVE, kv_heads=1),
        exchange=KeyExchange.ALL_GATHER,
        layout=Layout.CONTIGUOUS,
    ),
    "dualpipe-bfloat16-zero1": Mix(
        pp=2, dp=2, schedule="dualpipe", ahead=2, zero=1, bfloat16=True, tied=False, bucket_bytes=5000
    ),
}
MIXES |= {
    f"pp{pp}-tp{tp}-cp{cp}-dp{dp}": Mix(
        pp, tp, cp, dp, sequence=tp > 1, schedule="interleaved-1f1b" if pp > 1 else "1f1b"
    )
    for pp, tp, cp, dp in (SIZES if ALL else ())
    if pp * tp * cp * dp > 1
}


@dataclass(frozen=True, slots=True)
class Run:
    mix: Mix
    ranks: list[list[Event]]
    marks: list[list[tuple[Marked, list[Event]]]]
    """By rank each mark of communication with the calls that its range holds."""

    @property
    def shape(self) -> MeshShape:
        return self.mix.shape


@pytest.fixture(scope="module", params=MIXES)
def run(request: pytest.FixtureRequest, pool: Pool) -> Run:
    """A mix, trained once for all tests."""
    mix = MIXES[request.param]
    ranks = pool.run(train_profiled, mix, world=mix.world, timeout_s=300)
    return Run(mix, ranks, [marks_with_calls(events) for events in ranks])


def calls_of(events: list[Event]) -> list[Event]:
    return [event for event in events if event.name.startswith("c10d::")]


def is_rotation(mark: CommunicationMark) -> bool:
    """On gloo one all-to-all; the pipeline's exchanges are sends and receives."""
    return isinstance(mark, ExchangeMark) and mark.axis is not Axis.PP


def marks_with_calls(events: list[Event]) -> list[tuple[Marked, list[Event]]]:
    calls = sorted(calls_of(events), key=lambda call: call.start)
    return [(each, held_by(each.event, calls)) for each in marked(events)]


def held_by(event: Event, calls: list[Event]) -> list[Event]:
    """Those of the calls, in order of their starts, that an event holds."""
    first = bisect_left(calls, event.start, key=lambda call: call.start)
    end = bisect_right(calls, event.end, first, key=lambda call: call.start)
    return [call for call in calls[first:end] if event.holds(call)]


def test_every_mark_holds_the_calls_that_it_names(run: Run) -> None:
    for rank, marks in enumerate(run.marks):
        for each, calls in marks:
            if isinstance(each.mark, CollectiveMark):
                assert [KINDS.get(call.name) for call in calls] == [each.mark.kind], (rank, each, calls)
            else:
                expected = ["c10d::send" if link.sends else "c10d::recv_" for link in links_of(each.mark)]
                if is_rotation(each.mark):
                    expected = ["c10d::alltoall_base_"]
                assert [call.name for call in calls] == expected, (rank, each, calls)


def test_every_mark_names_the_axis_and_size_of_the_group(run: Run) -> None:
    for rank, events in enumerate(run.ranks):
        ordered = sorted(calls_of(events), key=lambda call: call.start)
        groups: dict[int, list[Event]] = {id(call): [] for call in ordered}
        for event in events:
            for call in held_by(event, ordered) if event.name.startswith(GROUP) else ():
                groups[id(call)].append(event)
        for each, calls in run.marks[rank]:
            mark = each.mark
            for index, call in enumerate(calls):
                (entries,) = groups[id(call)]
                description, members = entries.name.removeprefix(GROUP).split(" ")
                ranks = [int(member) for member in members.split(",")]
                assert description in DESCRIPTIONS[mark.axis], (rank, mark, entries)
                assert set(ranks) <= set(whole_group(run.shape, mark.axis, rank)), (rank, mark, entries)
                if isinstance(mark, CollectiveMark):
                    assert mark.size == len(ranks), (rank, mark, entries)
                elif is_rotation(mark):  # all parts are empty but one that leaves and one that comes
                    coming, leaving = ([ranks[i] for i, part in enumerate(parts) if part] for parts in call.lists)
                    assert ([link.peer for link in links_of(mark)]) == [*leaving, *coming], (rank, mark, call)
                else:
                    assert links_of(mark)[index].peer == ranks[int(call.numbers[0])], (rank, mark, call, entries)


def whole_group(shape: MeshShape, axis: Axis, rank: int) -> tuple[int, ...]:
    """All ranks of the axis; ring and Ulysses groups are parts of cp's."""
    pp, *others = shape.coordinates_of(rank)
    if axis is Axis.EMBEDDING:
        return shape.rank_of(0, *others), shape.rank_of(shape.pp - 1, *others)
    if axis is Axis.MIRROR:
        return rank, shape.rank_of(shape.pp - 1 - pp, *others)
    return next(group for group in shape.groups_of(axis) if rank in group)


def test_what_gloo_carries_is_what_the_marks_count(run: Run) -> None:
    for rank, events in enumerate(run.ranks):
        marks = marked(events)
        gloo = [event for event in events if event.name.startswith("gloo:")]
        entries = Counter(entry for each in marks for entry in gloo_entries(each.mark))
        result = Counter((event.name, numel * (item or 0)) for event in gloo for numel, item in event.inputs[:1])
        assert result == entries, (rank, result - entries, entries - result)
        for event in gloo:
            entry = (event.name, event.inputs[0][0] * (event.inputs[0][1] or 0))
            around = [each for each in marks if each.event.start <= event.start <= each.awaited_end]
            assert any(entry in gloo_entries(each.mark) for each in around), (rank, event)


def gloo_entries(mark: CommunicationMark) -> list[tuple[str, int]]:
    """(name that gloo gives it, bytes that a rank puts in) of a mark."""
    if isinstance(mark, CollectiveMark):
        return [(GLOO[mark.kind], mark.bytes // (mark.size if mark.kind is Collective.ALL_GATHER else 1))]
    if is_rotation(mark):
        return [("gloo:all_to_all", links_of(mark)[0].bytes)]
    return [("gloo:send" if link.sends else "gloo:recv", link.bytes) for link in links_of(mark)]


def test_predicted_calls_and_bytes_are_the_marked_ones(run: Run) -> None:
    """Of a step that runs in part again, because an update was taken back, at least the predicted ones are marked."""
    predicted = StepVolume(facts_of(run.mix, steps_of(run.mix)), run.mix.shape, run.mix.plan)
    again = False
    for rank, events in enumerate(run.ranks):
        marks = [each.mark for each in marked(events)]
        for step in range(steps_of(run.mix)):
            measured = total(volume_of(mark) for mark in marks if mark.step == step)
            expected = predicted.of_rank(rank, step)
            if run.mix is MIXES["rolled-back"] and step > 0:
                assert measured.keys() == expected.keys()
                assert all(measured[key].bytes >= calls.bytes for key, calls in expected.items()), (rank, step)
                again |= measured != expected
            else:
                assert measured == expected, (rank, step)
    assert again == (run.mix is MIXES["rolled-back"])
