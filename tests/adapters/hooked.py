"""Training under hooks in the processes of a pool: as a rank of ``pptrace run`` does, without a launcher."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from instrument.adapters.install import Adapters
from instrument.launch.facts import host_name, sample_clock
from instrument.launch.recording.optimizer_steps import OptimizerSteps
from instrument.recorder import Recorder
from instrument.session import Session
from pptrace.marks import METADATA_KEY
from pptrace.schedule.plan import Plan


class WatchedSession(Session):
    """Keeps what the hooks say."""

    def __init__(self) -> None:
        super().__init__(Recorder())
        self.facts: dict[str, object] = {}
        self.optimizers: OptimizerSteps | None = None
        self._passes = 0

    def describe_watched(self, framework: str, plan: Plan | None, pp_ranks: Sequence[int]) -> None:
        rows = None if plan is None else [list(map(str, plan.compute_actions(rank))) for rank in range(plan.pp)]
        self.facts |= {"framework": framework, "pp_ranks": list(pp_ranks)}
        if plan is not None:
            self.facts["plan"] = {"name": plan.name, "num_microbatches": plan.num_microbatches, "rows": rows}

    def begin_step(self) -> None:
        self._passes = 0
        super().begin_step()

    def begin_pass(self) -> int:
        if self.optimizers is not None:
            self.optimizers.ignore_backward()
            self.optimizers.begin()
            if self.optimizers.ends_before_pass(self._passes, have_optimizers=True):
                self.end_step()
                self.begin_step()
        self._passes += 1
        return self._passes - 1


@contextmanager
def hooks() -> Iterator[tuple[WatchedSession, Adapters]]:
    """Hooks of everything, until the body ends."""
    session = WatchedSession()
    steps = session.optimizers = OptimizerSteps(session)
    adapters = Adapters(session)
    try:
        yield session, adapters
    finally:
        adapters.remove()
        steps.detach()


@contextmanager
def recorded(path: Path, session: WatchedSession | None = None, adapters: Adapters | None = None) -> Iterator[None]:
    """Profile the body, into a trace with what the hooks learnt."""
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    facts: dict[str, Any] = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "host": host_name()}
    started = sample_clock()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, experimental_config=config) as profiler:
        yield
        if session is not None and adapters is not None:
            session._close_step_range()
            facts |= {**session.facts, **adapters.facts()}
            facts["clock"] = {"start": started, "stop": sample_clock()}
            facts.setdefault("framework", adapters.framework)
            profiler.add_metadata_json(METADATA_KEY, json.dumps(facts))
    profiler.export_chrome_trace(str(path))
