"""Work that a pass of Megatron-LM will run: its plan, and the order of the messages that a rank receives.

Source: ``megatron/core/pipeline_parallel/{schedules,combined_1f1b}.py`` of megatron-core 0.12 to 0.16.
"""

from __future__ import annotations

from dataclasses import dataclass

from pptrace.errors import ScheduleError, ShapeError
from pptrace.schedule import registry
from pptrace.schedule.actions import Kind
from pptrace.schedule.builders.interleaved import schedule_table
from pptrace.schedule.plan import Plan

Work = tuple[int, int]
"""(chunk, microbatch)"""


@dataclass(frozen=True, slots=True)
class PassShape:
    """The sizes of a pass. ``group_size`` is ``microbatch_group_size_per_vp_stage``.

    ``overlaps`` is ``overlap_moe_expert_parallel_comm``: a forward and a backward run as one.
    """

    pp: int
    num_microbatches: int
    num_chunks: int = 1
    group_size: int | None = None
    overlaps: bool = False

    @property
    def forwards(self) -> list[Work]:
        """The forwards of every rank in their order."""
        group = self.group_size or self.pp
        chunks = schedule_table(self.num_microbatches, self.num_chunks, group if self.num_chunks > 1 else 1)
        return [(chunk, microbatch) for microbatch, chunk in chunks]

    @property
    def backwards(self) -> list[Work]:
        return [(self.num_chunks - 1 - chunk, microbatch) for chunk, microbatch in self.forwards]

    def received(self, kind: Kind, rank: int) -> list[Work]:
        """Messages of a kind that ``rank`` receives, in their order, which is that of the sender's ops.

        The first rank receives activations from the last one, for the chunk after that of the sender; gradients go back
        likewise.
        """
        last = self.num_chunks - 1
        if kind is Kind.RECV_F:
            return self.forwards if rank else [(chunk + 1, mb) for chunk, mb in self.forwards if chunk < last]
        if rank < self.pp - 1:
            return self.backwards
        return [(chunk - 1, mb) for chunk, mb in self.backwards if chunk > 0]


def plan_of(shape: PassShape) -> Plan | None:
    """The plan of a pass; None where the shape is none that Megatron-LM runs."""
    name = "combined-1f1b" if shape.overlaps else "interleaved-1f1b" if shape.num_chunks > 1 else "1f1b"
    group = shape.group_size if shape.num_chunks > 1 else None
    entry = registry.get(name)
    try:
        if entry.only_groups_of_p and not entry.runs_without_labels(shape.pp, shape.num_microbatches, group):
            return None
        return entry.build(shape.pp, shape.num_microbatches, shape.num_chunks, group_size=group)
    except (ScheduleError, ShapeError):
        return None
