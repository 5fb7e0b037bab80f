"""The catalogue of schedules: every name that the command line takes, and its builder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pptrace.errors import ShapeError, UnknownScheduleError
from pptrace.garbage import paused_gc
from pptrace.schedule.builders import (
    controllable,
    dualpipe,
    interleaved,
    one_chunk,
    zb_auto,
    zbv,
)
from pptrace.schedule.plan import Plan
from pptrace.schedule.shape import OpCosts, Shape


@dataclass(frozen=True, slots=True)
class Schedule:
    """A catalogue entry.

    ``bubble`` is the closed form of the ideal bubble ratio and ``in_flight`` that of the most activations (of one chunk and
    one microbatch) that rank r holds, where W frees what a split backward keeps; p ranks, m microbatches, v chunks, N the
    microbatch group size, f, b, i and w the costs of one chunk's F, B, I and W with b = i + w, F&B that of an overlapped pair.
    They hold for m ≥ 2p; ``condition`` is a further condition. None for searched schedules.

    ``searches``: the builder reads costs and a memory limit. ``takes_any_chunks``: any v from 2, not its default alone.
    ``bidirectional``: half of the microbatches enter at each end. ``always_labelled``: no runtime runs it whose traces lack
    labels. ``only_if_m_is_p``, ``only_groups_of_p``: no runtime whose traces lack labels runs it with another
    number of microbatches than ranks, or with a last group of fewer microbatches than ranks. ``is_for_experts``: it hides
    exchanges with experts, and has no use without. ``torch_name``: that of torch.distributed.pipelining, "" where it has no such
    schedule.
    """

    name: str
    summary: str
    bubble: str | None
    in_flight: str | None
    source: str
    builder: Callable[[Shape], Plan]
    condition: str = ""
    default_chunks: int = 1
    searches: bool = False
    takes_any_chunks: bool = False
    takes_group_size: bool = False
    bidirectional: bool = False
    same_order_on_every_rank: bool = False
    always_labelled: bool = False
    only_if_m_is_p: bool = False
    only_groups_of_p: bool = False
    is_for_experts: bool = False
    torch_name: str = ""

    @property
    def bubble_text(self) -> str:
        """The closed form of the bubble as text, with its condition."""
        return "reported with its lower bound" if self.bubble is None else f"{self.bubble} {self.condition}".rstrip()

    @property
    def in_flight_text(self) -> str:
        """The closed form of the activations held, as text."""
        return "the memory limit" if self.in_flight is None else self.in_flight

    def runs_without_labels(self, pp: int, microbatches: int, group_size: int | None) -> bool:
        """Return whether a runtime whose traces lack labels may run this size."""
        if self.only_if_m_is_p:
            return microbatches == pp
        last = microbatches % (group_size or pp)
        return not self.only_groups_of_p or last == 0 or last >= pp

    def build(
        self,
        pp: int,
        microbatches: int,
        chunks: int | None = None,
        *,
        group_size: int | None = None,
        lean: bool = False,
        memory_limit: int | None = None,
        costs: OpCosts | None = None,
    ) -> Plan:
        """Build the plan of this schedule; the arguments are those of :func:`shape_for`.

            >>> print(get("1f1b").build(pp=2, microbatches=2))
            rank 0 | 0F0 0F1     0B0     0B1
            rank 1 |     1F0 1B0 1F1 1B1

        Raises:
            ShapeError: the schedule has no plan of this size; the message names legal sizes.
        """
        return self.build_shape(shape_for(self.name, pp, microbatches, chunks, group_size, lean, memory_limit, costs))

    def build_shape(self, shape: Shape) -> Plan:
        """:meth:`build` for a size that is made already.

        Raises:
            ShapeError: as :meth:`build`.
        """
        with paused_gc():
            return self.builder(shape)


SCHEDULES: dict[str, Schedule] = {
    entry.name: entry
    for entry in (
        Schedule(
            one_chunk.GPIPE,
            "all forwards, then all backwards",
            "(p−1)/m",
            "m",
            "GPipe, arXiv 1811.06965",
            one_chunk.build_gpipe,
            same_order_on_every_rank=True,
            torch_name="GPipe",
        ),
        Schedule(
            one_chunk.ONE_F_ONE_B,
            "one forward, one backward (PipeDream-flush)",
            "(p−1)/m",
            "min(p−r, m)",
            "Megatron-LM, arXiv 2104.04473",
            one_chunk.build_1f1b,
            torch_name="1F1B",
        ),
        Schedule(
            interleaved.ONE_F_ONE_B,
            "1F1B over v virtual stages per rank (VPP), depth-first",
            "(p−1)/(v·m)",
            "min(2(p−r−1)+(v−1)·N+1, v·m)",
            "Megatron-LM, arXiv 2104.04473",
            interleaved.build_1f1b,
            default_chunks=2,
            takes_any_chunks=True,
            takes_group_size=True,
            only_groups_of_p=True,
            torch_name="Interleaved1F1B",
        ),
        Schedule(
            interleaved.COMBINED,
            "interleaved 1F1B whose F and B overlap as one action, for exchanges with experts",
            "(p−1)F&B/(v·m(f+b))",
            "min(2(p−r−1)+(v−1)·N+2, v·m)",
            "Megatron-LM overlap_moe_expert_parallel_comm",
            interleaved.build_combined,
            default_chunks=2,
            takes_any_chunks=True,
            takes_group_size=True,
            always_labelled=True,
            is_for_experts=True,
        ),
        Schedule(
            interleaved.LOOPED_BFS,
            "breadth-first: all microbatches of a chunk, then the next chunk",
            "(p−1)/(v·m)",
            "v·m",
            "arXiv 2211.05953, torch ScheduleLoopedBFS",
            interleaved.build_looped_bfs,
            default_chunks=2,
            takes_any_chunks=True,
            same_order_on_every_rank=True,
            always_labelled=True,
            torch_name="LoopedBFS",
        ),
        Schedule(
            one_chunk.EAGER,
            "1F1B with twice the warmup: late messages hurt less",
            "(p−1)/m",
            "min(2(p−r−1)+1, m)",
            "eager-1F1B, arXiv 2211.05322",
            one_chunk.build_eager,
        ),
        Schedule(
            one_chunk.H1,
            "1F1B with the backward split, W in the drain",
            "(p−1)(f+i−w)/(m(f+b))",
            "min(p, m)",
            "zero bubble, arXiv 2401.10241",
            one_chunk.build_h1,
        ),
        Schedule(
            one_chunk.H2,
            "more warmup, W in every gap; ranks end staggered",
            "(p−1)(f+i−2w)/(m(f+b))",
            "min(2p−1, m)",
            "zero bubble, arXiv 2401.10241",
            one_chunk.build_h2,
            "within a rank",
        ),
        Schedule(
            zb_auto.NAME,
            "searched for given costs and memory limit",
            None,
            None,
            "zero bubble, arXiv 2401.10241",
            zb_auto.build,
            searches=True,
        ),
        Schedule(
            interleaved.ZERO_BUBBLE,
            "interleaved 1F1B with the backward split (ZB1P)",
            "(p−1)(f+i−w)/(v·m(f+b))",
            "min((v−1)·N+p, v·m)",
            "torch ScheduleInterleavedZeroBubble",
            interleaved.build_zero_bubble,
            default_chunks=2,
            takes_any_chunks=True,
            takes_group_size=True,
            torch_name="InterleavedZeroBubble",
        ),
        Schedule(
            zbv.NAME,
            "two chunks on a V, backward split; ranks end staggered",
            "0",
            "min(2p, 2m)",
            "arXiv 2401.10241, torch ScheduleZBVZeroBubble",
            zbv.build,
            "within a rank if f = i = w",
            default_chunks=2,
            torch_name="ZBVZeroBubble",
        ),
        Schedule(
            controllable.HALF,
            "a V in about half the memory of 1F1B, for f = i = w",
            "≤ (p−1)/(2m)",
            "2(⌊p/2⌋+1)",
            "controllable memory, arXiv 2405.15362",
            controllable.build_half,
            "if f = i = w",
            default_chunks=2,
        ),
        Schedule(
            controllable.MIN,
            "a V in about a third of the memory of 1F1B, for f = i = w",
            "≤ 2(p−1)/(3m)",
            "2(⌊(p+1)/3⌋+1)",
            "controllable memory, arXiv 2405.15362",
            controllable.build_min,
            "if f = i = w",
            default_chunks=2,
        ),
        Schedule(
            dualpipe.DUALPIPE_V,
            "half of DualPipe on a V: F and B overlap as one action",
            "(p−1)(F&B+b−3w)/(2m(f+b))",
            "2p+1",
            "DeepSeek, torch ScheduleDualPipeV",
            dualpipe.build_v,
            "if f = i",
            default_chunks=2,
            torch_name="DualPipeV",
        ),
        Schedule(
            dualpipe.DUALPIPE,
            "fed from both ends, F and B overlap; every stage on two ranks",
            "(p/2−1)(F&B+b−3w)/(m(f+b))",
            "p+1",
            "DeepSeek-V3, arXiv 2412.19437",
            dualpipe.build,
            "if f = i",
            default_chunks=2,
            bidirectional=True,
        ),
        Schedule(
            interleaved.AFAB,
            "interleaved, all forwards first: older Megatron-LM's for m = p",
            "(p−1)/(v·m)",
            "v·m",
            "Megatron-LM before microbatch groups",
            interleaved.build_afab,
            default_chunks=2,
            takes_any_chunks=True,
            takes_group_size=True,
            same_order_on_every_rank=True,
            only_if_m_is_p=True,
        ),
    )
}


def get(name: str) -> Schedule:
    """The catalogue entry of a name.

    Raises:
        UnknownScheduleError: no schedule has that name.
    """
    try:
        return SCHEDULES[name]
    except (KeyError, TypeError):  # TypeError: what has no hash
        raise UnknownScheduleError(f"schedule {name!r} is not known; expected one of {', '.join(SCHEDULES)}") from None


def build(
    name: str,
    pp: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    group_size: int | None = None,
    lean: bool = False,
    memory_limit: int | None = None,
    costs: OpCosts | None = None,
) -> Plan:
    """Build the plan of a named schedule; the arguments are those of :func:`shape_for`.

    Raises:
        UnknownScheduleError: no schedule has that name.
        ShapeError: the shape is illegal for it; the message names legal sizes.
    """
    return get(name).build(
        pp, num_microbatches, num_chunks, group_size=group_size, lean=lean, memory_limit=memory_limit, costs=costs
    )


def shape_for(
    name: str,
    pp: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    group_size: int | None = None,
    lean: bool = False,
    memory_limit: int | None = None,
    costs: OpCosts | None = None,
) -> Shape:
    """The shape of a named schedule; ``num_chunks`` None means the schedule's default.

    Raises:
        UnknownScheduleError: no schedule has that name.
        ShapeError: a size below 1, or a memory limit for a schedule that is not searched.
    """
    entry = get(name)
    if memory_limit is not None and not entry.searches:
        searched = ", ".join(other.name for other in SCHEDULES.values() if other.searches)
        raise ShapeError(f"{name}: its memory is fixed; a memory limit belongs to {searched}")
    chunks = entry.default_chunks if num_chunks is None else num_chunks
    return Shape(pp, num_microbatches, chunks, group_size, lean, memory_limit, costs or OpCosts())
