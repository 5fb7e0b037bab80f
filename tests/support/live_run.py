"""A run directory with live files of a small pipeline, written as its ranks would, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from instrument.launch.facts import plan_as_json
from instrument.launch.record import write_json
from pptrace.live_records.codec import Flag, StepHead
from pptrace.live_records.file import LiveWriter, live_path
from pptrace.marks import OpMark, SpanKind, SpanMark, format_mark
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build

STEP_NS = 200_000_000
CLOCK = {"time_ns": 1_790_000_000_000_000_000, "monotonic_ns": 5_000_000_000, "perf_counter_ns": 6_000_000_000}
"""Begin of the run: always the same, so that its reports are."""
_MICROBATCHES = 4


class LiveFolder:
    """A run of 1F1B whose ranks run their ops one after the other, without messages.

    ``wall_step_ns``: by how much the wall clock was set between the readings of two ranks.
    """

    def __init__(self, folder: Path, pp: int = 2, device: str = "cpu", hosts: int = 1, wall_step_ns: int = 0) -> None:
        self.folder, self.steps = folder, 0
        self._plan = build("1f1b", pp, _MICROBATCHES)
        self._noise = np.random.default_rng(7)
        folder.mkdir(parents=True, exist_ok=True)
        self.status("running")
        self._writers = [LiveWriter(live_path(folder, rank)) for rank in range(pp)]
        self._programs: dict[tuple[int, tuple[str, ...]], int | None] = {}
        for rank, writer in enumerate(self._writers):
            writer.facts(
                {
                    "rank": rank,
                    "world_size": pp,
                    "host": f"host{rank % hosts}",
                    "framework": "pptrace",
                    "mesh": {"pp": pp},
                    "pp_ranks": list(range(pp)),
                    "plan": plan_as_json(self._plan),
                    "device": device,
                    "clock": {"start": CLOCK | {"time_ns": CLOCK["time_ns"] + rank * wall_step_ns}},
                }
            )

    def status(self, status: str) -> None:
        """Write run.json."""
        write_json(self.folder / "run.json", {"schema": "pptrace.run/1", "status": status, "ranks": []})

    def write_steps(
        self, num: int, factors: Mapping[int, float] | None = None, microbatches: int | None = None
    ) -> None:
        """Append steps, of which every fifth is not observed; ops of some ranks take so many times as long."""
        plan = self._plan if microbatches is None else build("1f1b", self._plan.pp, microbatches)
        for _ in range(num):
            for rank in range(len(self._writers)):
                self._write_step(rank, (factors or {}).get(rank, 1.0), plan)
            self.steps += 1

    def _write_step(self, rank: int, factor: float, plan: Plan) -> None:
        step, writer = self.steps, self._writers[rank]
        begin_ns = CLOCK["perf_counter_ns"] + step * STEP_NS
        if step % 5 == 4:
            writer.bounds(StepHead(step, Flag(0), begin_ns, STEP_NS - 10**6))
            return
        names, begins, ends = [], [], []
        now_ns, op_ns = begin_ns, 0
        for action in plan.compute_actions(rank):
            lasts_ns = int((5e6 if action.kind == "F" else 10e6) * factor * self._noise.lognormal(0, 0.01))
            names.append(format_mark(OpMark(action, 0)))
            begins.append(now_ns)
            ends.append(now_ns := now_ns + lasts_ns)
            now_ns, op_ns = now_ns + 10**6, op_ns + lasts_ns
        names.append(format_mark(SpanMark(SpanKind.STEP, 0)))
        begins.append(begin_ns)
        ends.append(begin_ns + STEP_NS - 10**6)
        key = (rank, tuple(names))
        if key not in self._programs:
            self._programs[key] = writer.program(names)
        program = self._programs[key]
        head = StepHead(step, Flag.OBSERVED, begin_ns, STEP_NS - 10**6, op_ns, 0, 10**5, 0)
        if program is None:
            writer.bounds(head)
        else:
            writer.step(head, program, begins, ends)
