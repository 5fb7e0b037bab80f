"""Plans run on real processes with ops that sleep for known times, read back from their traces with pptrace's own analysis.

Sleeping ranks need next to no cores, so four of them keep time on two; what remains beside the sleeps is the runtime's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from instrument.data.text import TextData
from instrument.launch.facts import TRACE_SCHEMA, host_name, plan_as_json, sample_clock
from instrument.launch.recording.core_wait import CoreWait
from instrument.launch.recording.profiler import TraceProfiler
from instrument.mesh import fit_shape, make_mesh
from instrument.models.gpt import GptStage
from instrument.models.gpt_config import GptConfig
from instrument.models.gpt_pipeline import GptPipeline, Wiring, make_gpt_runtime
from instrument.models.sleeping import SleepingStage
from instrument.pipeline.partition import partition
from instrument.recorder import Recorder
from instrument.session import Session
from pptrace.model.tables import COMPUTE_KINDS
from pptrace.schedule.lower import lower
from pptrace.schedule.outstanding import outstanding
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from pptrace.simulator import IDEAL, Costs, simulate, uniform
from pptrace.slices import slice_of
from pptrace.workflow.load import load
from tests.support.costs_by_keys import measured_costs
from tests.support.pool import Pool

WARMUP_STEPS = 1
MICROBATCH_SIZE = 1


@dataclass(frozen=True, slots=True)
class SleepingRun:
    """A run: which schedule, and how long its ops sleep. ``forward_s`` is that of one chunk's F; I and W sleep as long."""

    schedule: str
    pp: int
    microbatches: int
    chunks: int | None
    forward_s: float
    steps: int
    ahead: int

    @property
    def plan(self) -> Plan:
        return lower(build(self.schedule, self.pp, self.microbatches, self.chunks))


def sleep_through(run: SleepingRun, folder: str) -> int:
    """Run the steps under the profiler and write ``rank<r>.json.gz``; called by every rank of a pool.

    Returns:
        The most forwards in flight in any step.
    """
    plan = run.plan
    mesh = make_mesh(fit_shape(run.pp, run.pp), "cpu", "gloo", plan.num_chains > 1)
    recorder = Recorder()
    config = GptConfig(plan.chain_length, hidden=8, heads=2, sequence=4)
    cut = partition(config.layers, plan.chain_length)

    def wrap(stage: GptStage) -> torch.nn.Module:
        return SleepingStage(stage, run.forward_s, 2 * run.forward_s)

    gpt = GptPipeline(plan, config, cut, MICROBATCH_SIZE, wrap)
    runtime = make_gpt_runtime(mesh, gpt, Wiring(torch.device("cpu"), prefetch_depth=run.ahead), recorder)
    batch = TextData(plan.num_microbatches, MICROBATCH_SIZE, config.sequence).batch(0, 0)
    profiler = TraceProfiler(Path(folder) / f"rank{mesh.rank}.json.gz")
    profiler.prepare()
    peak = 0
    started, core_wait = sample_clock(), CoreWait.now()
    for step in Session(recorder).steps(WARMUP_STEPS + run.steps):
        if step == WARMUP_STEPS:
            profiler.start()
            core_wait = CoreWait.now()
        dist.barrier()  # ranks that end early would begin the next step in this one's window
        peak = max(peak, runtime.run(batch, step).peak_in_flight)
    waited = core_wait.until(CoreWait.now())
    clock = {"start": started, "stop": sample_clock()}
    profiler.stop(
        {
            "schema": TRACE_SCHEMA,
            "rank": mesh.rank,
            "world_size": run.pp,
            "host": host_name(),
            "mesh": {"pp": run.pp},
            "pp_ranks": list(mesh.pp_ranks),
            "plan": plan_as_json(plan),
            "clock": clock,
            "core_wait": waited,
        }
    )
    return peak


@dataclass(frozen=True, slots=True)
class Measured:
    """A run beside its plan. Bubbles are ratios: bubble over compute, all ranks together; medians over the steps.

    ``ideal`` is that of F = I = W and free messages, ``simulated`` that of the measured op times and free messages. In
    flight are forwards whose backward (B or I) has not run, on the rank that has most.
    """

    run: SleepingRun
    plan: Plan
    ideal: float
    simulated: float
    measured: float
    span_errors: tuple[float, ...]
    in_flight_planned: int
    in_flight_measured: int

    @property
    def span_error(self) -> float:
        """Excess of a step's time over the simulated one, as a part of that; the median over the steps."""
        return median(self.span_errors)

    @property
    def bubble_error(self) -> float:
        """Excess of the measured bubble over the simulated one, as a part of the simulated one."""
        return self.measured / self.simulated - 1


def measure(pool: Pool, run: SleepingRun, folder: Path) -> Measured:
    """Run a plan on the pool and compare what its traces say with the simulator."""
    peaks = pool.run(sleep_through, run, str(folder), world=run.pp, timeout_s=300)
    analysis = load([folder])
    plan = analysis.schedule.plan
    assert not analysis.report.schedule.mismatches
    simulated, measured, errors = [], [], []
    for step in analysis.report.steps:
        ops = analysis.data.ops
        step_ops = ops[(ops["step"] == step.step) & ops["kind"].isin(COMPUTE_KINDS)]
        paper = simulate(plan, Costs(ops=measured_costs(slice_of(step_ops), slice_of(analysis.data.comms[:0])).ops))
        assert step.bubble.ratio is not None
        simulated.append(paper.bubble_ratio)
        measured.append(step.bubble.ratio)
        errors.append(step.span_ns / paper.makespan_ns - 1)
    assert len(errors) == run.steps
    return Measured(
        run,
        plan,
        simulate(plan, IDEAL).bubble_ratio,
        median(simulated),
        median(measured),
        tuple(errors),
        max(outstanding(plan, rank).in_flight for rank in range(plan.pp)),
        max(peaks),
    )


def forward_for(plan: Plan, bubble_s: float) -> float:
    """Time that an F, an I and a W each sleep where the mean ideal bubble of the ranks is to last ``bubble_s``, s."""
    paper = simulate(plan, uniform(forward_ns=1, backward_ns=2))
    return bubble_s * len(paper.ranks) / sum(rank.bubble_ns for rank in paper.ranks)
