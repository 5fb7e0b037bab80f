"""Parts ``schedules``, ``meshes``, ``experts`` and ``nccl-exact``: ranks that share a GPU train as one process does.

    python -m tools.gpu.exact schedules …       every schedule of the catalogue on four pipeline ranks: loss and all gradients
    python -m tools.gpu.exact meshes …          tp, sp, cp, zero, overlap and recompute: loss and parameters after three steps
    python -m tools.gpu.exact experts …         the same with experts: dispatchers, overlap, etp
    python -m tools.gpu.exact nccl-exact …      schedules, meshes and experts once more: over NCCL, not through host memory

float64, within 1e-9. In a mesh each call to a process group also lies in exactly one mark of its axis.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from instrument.context.shard import KeyExchange
from instrument.models.gpt_config import Recompute
from instrument.optim.clipping import OptimizerSync
from pptrace.schedule.registry import SCHEDULES
from pptrace.sizes.expert_options import Dispatcher, ExpertOptions
from tests.instrument.expert import test_exact as test_expert_exact
from tests.instrument.models import test_mixes
from tests.instrument.models.cases.mixes import Mix
from tests.instrument.pipeline import test_exact
from tests.instrument.pipeline.cases.training import Case
from tests.support.pool import Pool
from tools.gpu.device import touch_device
from tools.gpu.part import Setting, run_part

RANKS, LARGE = 4, 8
START_S, CASE_S, DRY_CASE_S = 120.0, 60.0, 240.0
SMALL_SCHEDULES = ("1f1b", "zbv", "1f1b, graphs")
"""Of the dry run."""
GRAPHED = ("gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-afab")
"""Schedules of whole backwards, whose stages are captured as CUDA graphs as well; on CPUs these are recorded operators."""

MESHES: Mapping[str, Mix] = MappingProxyType(
    {
        "tp": Mix(tp=4),
        "pp tp": Mix(pp=2, tp=2),
        "pp tp sp": Mix(pp=2, tp=2, sequence=True),
        "tp overlap": Mix(tp=4, overlap=True),
        "pp tp sp overlap": Mix(pp=2, tp=2, sequence=True, overlap=True),
        "cp ring": Mix(cp=4),
        "cp ulysses": Mix(cp=4, ulysses=2),
        "cp gathered": Mix(cp=4, exchange=KeyExchange.ALL_GATHER),
        "pp cp": Mix(pp=2, cp=2),
        "pp dp": Mix(pp=2, dp=2, bucket_bytes=1000),
        "zero 1": Mix(dp=2, pp=2, zero=1, schedule="zb-h1"),
        "zero 1, graphs": Mix(dp=2, pp=2, zero=1, schedule="interleaved-1f1b", graphs=True),
        "zero 2": Mix(dp=2, pp=2, zero=2),
        "zero 3": Mix(dp=2, pp=2, zero=3),
        "zero 3 clipped": Mix(dp=2, pp=2, zero=3, tied=False, clip=0.3),
        "clipped": Mix(pp=2, tp=2, clip=0.3),
        "post-validation": Mix(pp=2, tp=2, clip=0.3, sync=OptimizerSync.POST_VALIDATION),
        "tp copied KV heads": Mix(tp=4, kv_heads=1, sequence=True),
        "zbv tp sp overlap": Mix(pp=2, tp=2, sequence=True, overlap=True, schedule="zbv", ahead=2),
        "dualpipe tp": Mix(pp=2, tp=2, schedule="dualpipe"),
        "recompute full": Mix(pp=2, tp=2, sequence=True, recompute=Recompute.FULL),
        "recompute selective": Mix(pp=2, cp=2, recompute=Recompute.SELECTIVE),
        "pp tp cp sp": Mix(pp=2, tp=2, cp=2, sequence=True),
        "pp tp dp zero 3": Mix(pp=2, tp=2, dp=2, sequence=True, zero=3),
    }
)
"""In order of importance; the last two need eight ranks."""

SMALL_MESHES = ("pp tp sp",)

_OPTIONS = ExpertOptions(4, 2, aux_loss=0.05, z_loss=0.01)
_OVERLAPPED = replace(_OPTIONS, overlap=True, shared_width=8)
_GROUPED = replace(_OPTIONS, grouped=True)
_EXPERTS = Mix(dp=2, ep=2, experts=_OPTIONS, clip=0.3)
EXPERTS: Mapping[str, Mix] = MappingProxyType(
    {
        "all-to-all": replace(_EXPERTS, pp=2),
        "overlap": replace(_EXPERTS, pp=2, experts=_OVERLAPPED),
        "overlapped pairs": replace(_EXPERTS, pp=2, schedule="dualpipe", experts=_OVERLAPPED),
        "padded": replace(_EXPERTS, pp=2, experts=replace(_OPTIONS, dispatcher=Dispatcher.PADDED, capacity_factor=0.8)),
        "all-gather": replace(_EXPERTS, pp=2, experts=replace(_OPTIONS, dispatcher=Dispatcher.ALL_GATHER)),
        "split backward, zero 1": replace(_EXPERTS, pp=2, schedule="zb-h1", zero=1, ahead=2),
        "tp sp, folded": replace(_EXPERTS, tp=2, ep=4, sequence=True, experts=_OVERLAPPED),
        "etp": replace(_EXPERTS, tp=2, ep=2, etp=2),
        "cp": replace(_EXPERTS, cp=2, dp=2, ep=4, zero=1),
        "grouped, split backward": replace(_EXPERTS, pp=2, schedule="zb-h1", zero=1, experts=_GROUPED),
        "grouped, overlapped pairs": replace(
            _EXPERTS, pp=2, schedule="dualpipe", experts=replace(_OVERLAPPED, grouped=True)
        ),
    }
)
NCCL_MESHES = (
    *("tp", "pp tp sp overlap", "cp ring", "cp ulysses", "cp gathered", "pp dp", "zero 1", "zero 3 clipped"),
    "post-validation",
    *("zbv tp sp overlap", "dualpipe tp", "pp tp cp sp"),
)
NCCL_EXPERTS = ("all-to-all", "overlap", "overlapped pairs", "padded", "split backward, zero 1", "tp sp, folded")


def schedules(setting: Setting) -> None:
    cases = {name: [schedule_case(name), schedule_case(name, ahead=2)] for name in SCHEDULES}
    cases |= {f"{name}, graphs": [replace(case, graphs=True) for case in cases[name]] for name in GRAPHED}
    if setting.dry:
        cases = {name: cases[name][:1] for name in SMALL_SCHEDULES}
    _each(setting, cases, RANKS, lambda pool, name: test_exact.check(pool, cases[name]))


def schedule_case(name: str, ahead: int = 0) -> Case:
    return Case(name, RANKS, 2 * RANKS, chunks=SCHEDULES[name].default_chunks, backend="host-staged", ahead=ahead)


def meshes(setting: Setting) -> None:
    _meshes(setting, {name: replace(mix, host_staged=True) for name, mix in MESHES.items()}, SMALL_MESHES)


def experts(setting: Setting) -> None:
    _meshes(setting, {name: replace(mix, host_staged=True) for name, mix in EXPERTS.items()}, ("overlap",))


def nccl_exact(setting: Setting) -> None:
    """Everything over NCCL that takes other ways there: schedules and their messages, collectives that overlap, all-to-alls."""
    cases = {f"nccl {name}": replace(schedule_case(name), backend="nccl") for name in SCHEDULES}
    if setting.dry:
        cases = {name: cases[name] for name in ("nccl 1f1b",)}
    _each(setting, cases, RANKS, lambda pool, name: test_exact.check(pool, [cases[name]]))
    chosen = {name: MESHES[name] for name in NCCL_MESHES} | {name: EXPERTS[name] for name in NCCL_EXPERTS}
    mixes = {f"nccl {name}": replace(mix, nccl=True) for name, mix in chosen.items()}
    _meshes(setting, mixes, ("nccl tp",))


def _meshes(setting: Setting, mixes: Mapping[str, Mix], small: Sequence[str]) -> None:
    """A check for each mix; ``small`` are those of the dry run."""
    if setting.dry:
        mixes = {name: mixes[name] for name in small}

    def check(pool: Pool, name: str) -> None:
        of_kind = test_mixes.check if mixes[name].experts is None else test_expert_exact.check
        of_kind(pool, [mixes[name]])

    for ranks in (RANKS, LARGE):
        _each(setting, [name for name, mix in mixes.items() if (mix.world > RANKS) == (ranks > RANKS)], ranks, check)


class _LimitedPool(Pool):
    """A pool of which no case outlasts what is left to the part, nor its own limit."""

    def __init__(self, size: int, setting: Setting) -> None:
        super().__init__(size)
        self._setting = setting

    def run(
        self, function: Callable[..., Any], *arguments: Any, world: int | None = None, timeout_s: float = DRY_CASE_S
    ) -> list[Any]:
        limit_s = max(1.0, min(timeout_s, DRY_CASE_S if self._setting.dry else CASE_S, self._setting.left_s))
        return super().run(function, *arguments, world=world, timeout_s=limit_s)


def _each(setting: Setting, names: Iterable[str], ranks: int, check: Callable[[Pool, str], object]) -> None:
    """A check for each name on one pool of ranks, while there is time."""
    waiting = list(names)
    if not waiting:
        return
    with _LimitedPool(ranks, setting) as pool:
        with setting.checks.check(f"{ranks} ranks start"):  # each imports torch, which takes a cold disk a minute
            Pool.run(pool, touch_device, timeout_s=max(1.0, min(START_S, setting.left_s)))
        while waiting and setting.left_s > 0:
            name = waiting.pop(0)
            with setting.checks.check(name) as figures:
                figures["device"] = "cuda" if torch.cuda.is_available() else "cpu"
                check(pool, name)
    setting.skip_rest(waiting)


PARTS = {"schedules": schedules, "meshes": meshes, "experts": experts, "nccl-exact": nccl_exact}

if __name__ == "__main__":
    sys.exit(run_part(PARTS[sys.argv[1]], sys.argv[2:]))
