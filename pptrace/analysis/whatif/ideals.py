"""Ideals: what ``--ideal`` names costs what its like costs elsewhere in the run."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.matrix.step_matrix import pipelines_of
from pptrace.analysis.whatif.stage_costs import BACKWARD, F, StageCosts, W
from pptrace.errors import UsageError
from pptrace.model.tables import Floats
from pptrace.schedule.actions import Kind
from pptrace.schedule.needs import Output

_OUTPUTS = {Kind.F: (F,), Kind.B: (BACKWARD, W), Kind.I: (BACKWARD,), Kind.W: (W,)}
_WORDS = ("jitter", "communication", "stragglers", "host", "routing")
EXPECTED = (
    "stage=N, rank=N, kind=F|B|I|W, jitter, communication, stragglers, host, routing, or outside=PART (a part of the step "
    "that is outside its pipeline, such as data)"
)


class Ideal(Struct, frozen=True):
    """Part of a run that becomes ideal: ``name`` as the user writes it, ``what`` its word, ``place`` what stands behind "="."""

    name: str
    what: str
    place: int | Kind | str | None = None


def parse_ideal(text: str) -> Ideal:
    """Read what ``--ideal`` takes.

    Raises:
        UsageError: it is none of them.
    """
    what, _, place = text.partition("=")
    if text in _WORDS:
        return Ideal(text, what)
    if what in ("stage", "rank") and place.isascii() and place.isdigit():
        return Ideal(text, what, int(place))
    if what == "kind" and place in {kind.value for kind in _OUTPUTS}:
        return Ideal(text, what, Kind(place))
    if what == "outside" and place:
        return Ideal(text, what, place)
    raise UsageError(f"--ideal {text}: expected {EXPECTED}")


def apply_ideal(costs: StageCosts, ideal: Ideal) -> StageCosts:
    """The costs with that made ideal.

    Raises:
        UsageError: the run has no such stage or rank, or nothing is known of routes.
    """
    match ideal.what, ideal.place:
        case "stage", int(stage):
            return _with_stage(costs, ideal.name, stage)
        case "rank", int(rank):
            return _with_rank(costs, ideal.name, rank)
        case "kind", Kind() as kind:
            return _with_outputs(costs, _OUTPUTS[kind])
        case "stragglers", _:
            return replace(
                without_transfers_that_vary(_with_outputs(costs, tuple(Output))), delay=np.zeros_like(costs.delay)
            )
        case "jitter", _:
            computed = costs.work - costs.inner
            for _, windows in pipelines_of(costs.ranks):  # the median of their kind in their stage of their pipeline
                computed[windows] = np.median(computed[windows], axis=(0, 2), keepdims=True)
            return replace(costs, work=computed + costs.inner)
        case "routing", _:
            if costs.routed_work is None or costs.routed_inner is None:
                raise UsageError(
                    "--ideal routing: nothing to make equal: experts on all ranks have equally many rows, or calls do not tell "
                    "how many"
                )
            work = costs.work * (1 - costs.routed_work)
            inner = np.minimum(costs.inner * (1 - costs.routed_inner), work)
            return replace(costs, work=work, inner=inner, routed_work=None)
        case "host", _:
            return replace(costs, delay=np.zeros_like(costs.delay))
    zeros = np.zeros_like(costs.inner)
    return replace(costs, work=costs.work - costs.inner, inner=zeros, transfer=np.zeros_like(costs.transfer))


def _with_outputs(costs: StageCosts, outputs: tuple[Output, ...]) -> StageCosts:
    """Ops of some outputs at the mean over all stages and steps, as the study of stragglers has it."""
    work, inner = costs.work.copy(), costs.inner.copy()
    for output in outputs:
        work[..., output], inner[..., output] = work[..., output].mean(), inner[..., output].mean()
    return replace(costs, work=work, inner=inner)


def without_transfers_that_vary(costs: StageCosts) -> StageCosts:
    """Messages at the median of their direction."""
    transfer = costs.transfer.copy()
    for direction, stages in ((F, slice(0, -1)), (BACKWARD, slice(1, None))):
        if transfer[:, stages, :, direction].size:
            transfer[:, stages, :, direction] = np.median(transfer[:, stages, :, direction])
    return replace(costs, transfer=transfer)


def _with_stage(costs: StageCosts, name: str, stage: int) -> StageCosts:
    """Ops of a stage shortened to what those of the other stages usually take."""
    if not stage < costs.num_stages:
        raise UsageError(f"--ideal {name}: the run has stages 0 to {costs.num_stages - 1}")
    typical = costs.typical
    factors = np.ones((*costs.owners.shape, len(Output)))
    factors[stage] = _shortening(typical[stage], np.delete(typical, stage, axis=0))
    return _scaled(costs, slice(None), factors)


def _with_rank(costs: StageCosts, name: str, rank: int) -> StageCosts:
    """Ops of a global rank shortened to what its replicas take; without any, to what the other ranks' stages take."""
    if not (costs.ranks == rank).any():
        raise UsageError(f"--ideal {name}: the run has ranks {', '.join(map(str, np.unique(costs.ranks).tolist()))}")
    pipelines = pipelines_of(costs.ranks)
    medians = {ranks: np.median(costs.work[windows], axis=(0, 2)) for ranks, windows in pipelines}
    own, windows = next((ranks, windows) for ranks, windows in pipelines if rank in ranks)
    is_own = costs.owners == own.index(rank)
    elsewhere = [stage for stage in range(costs.num_stages) if not is_own[stage].any()]
    factors = np.ones((*costs.owners.shape, len(Output)))
    for stage in np.flatnonzero(is_own.any(axis=1)).tolist():
        if len(medians) == 1:
            factor = _shortening(medians[own][stage], medians[own][elsewhere])
        else:
            replicas = np.sort([of_one[stage] for of_one in medians.values()], axis=0)
            factor = _shortening(medians[own][stage], replicas[[(len(medians) - 1) // 2]])
        factors[stage, is_own[stage]] = factor
    return _scaled(costs, windows, factors)


def _shortening(cost: Floats, others: Floats) -> Floats:
    """The factors by output, at most 1, with which ops take the median of others, shape (others, outputs)."""
    usual = np.median(others, axis=0) if len(others) else cost
    return np.minimum(np.divide(usual, cost, out=np.ones(len(cost)), where=cost > 0), 1.0)


def _scaled(costs: StageCosts, windows: slice | np.typing.NDArray[np.intp], factors: Floats) -> StageCosts:
    """Ops in some windows with factors by stage, microbatch and output."""
    work, inner = costs.work.copy(), costs.inner.copy()
    work[windows] *= factors
    inner[windows] *= factors
    return replace(costs, work=work, inner=inner)
