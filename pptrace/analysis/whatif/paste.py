"""Changes as options to paste: of this project's runtime, of Megatron-LM and of torchtitan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from pptrace.analysis.whatif.change import Change, layers_of_stages
from pptrace.analysis.whatif.stage_costs import StageCosts
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import SCHEDULES

PPTRACE, MEGATRON, TORCHTITAN = "pptrace", "Megatron-LM", "torchtitan"
_OF_MEGATRON = ("1f1b", "interleaved-1f1b")
"""Schedules that Megatron-LM runs: which of them follows from the number of virtual stages."""


def options_of(
    change: Change, schedule: str, plan: Plan, costs: StageCosts, sequences: int | None = None
) -> Mapping[str, str]:
    """The options by framework that make a change; none of a framework that cannot, and {} of a change that no option makes.

    Args:
        change: from the measured run.
        schedule: name of the schedule after it.
        plan: the plan after it.
        costs: those of the measured run, with the layers of its stages where they are known.
        sequences: in a microbatch of the measured run, None where that is not known.
    """
    if change.ideals or change.link_speed != 1 or change.placement is not None:
        return {}
    if schedule in SCHEDULES and SCHEDULES[schedule].searches:  # a search elsewhere does not know the measured costs
        return {}
    if change.microbatch_size != 1 and sequences is None:
        return {}
    size = None if change.microbatch_size == 1 else str(round((sequences or 1) * change.microbatch_size))
    split = _split(change, plan, costs)
    of_pptrace = {
        "--schedule": change.schedule if schedule in SCHEDULES else None,
        "--chunks": str(plan.num_chunks) if _changes_chunks(change, schedule) else None,
        "--split": None if split is None else ",".join(map(str, split)),
        "--microbatches": None if change.microbatches is None else str(change.microbatches),
        "--microbatch-size": size,
        "--prefetch": None if change.prefetch is None else str(change.prefetch),
    }
    lines = {PPTRACE: _joined(of_pptrace)}
    if change.prefetch is None and change.work(costs.plan) == 1:  # the number of microbatches follows from their size
        lines[MEGATRON] = _of_megatron(change, schedule, plan, split, size)
        lines[TORCHTITAN] = _of_torchtitan(change, schedule, plan, split, size)
    return {framework: line for framework, line in lines.items() if line}


_CHUNKS = 2
"""Stages of each rank that torchtitan makes where it is not given their number."""


def _changes_chunks(change: Change, schedule: str) -> bool:
    return (
        (change.schedule or change.chunks) is not None
        and schedule in SCHEDULES
        and SCHEDULES[schedule].takes_any_chunks
    )


def _split(change: Change, plan: Plan, costs: StageCosts) -> tuple[int, ...] | None:
    """The layers of the stages where they change: as asked for, or where there are more or fewer stages; None if not known."""
    if change.split is not None or costs.layers is None or plan.chain_length == costs.num_stages:
        return change.split
    layers = layers_of_stages(costs, plan.chain_length)
    return tuple(map(int, layers)) if all(count == int(count) for count in layers) else None


def _runs_elsewhere(plan: Plan) -> bool:
    """Return whether other runtimes run an interleaved plan in this order: of a last group smaller than p they make others."""
    return plan.num_stages == plan.pp or plan.num_microbatches % plan.pp == 0


def _of_megatron(change: Change, schedule: str, plan: Plan, split: tuple[int, ...] | None, size: str | None) -> str:
    if schedule not in _OF_MEGATRON or not _runs_elsewhere(plan):
        return ""
    has_chunks = plan.num_stages > plan.pp
    options = [] if split is None else [megatron_layout(split, has_chunks=has_chunks)]
    if split is None and has_chunks and _changes_chunks(change, schedule):  # a layout tells the virtual stages itself
        options.append(f"--num-virtual-stages-per-pipeline-rank {plan.num_chunks}")
    return " ".join([*options, _joined({"--micro-batch-size": size})]).strip()


def _of_torchtitan(change: Change, schedule: str, plan: Plan, split: tuple[int, ...] | None, size: str | None) -> str:
    """Without a split torchtitan makes two stages for each rank of an interleaved schedule."""
    name = SCHEDULES[schedule].torch_name if schedule in SCHEDULES else ""
    if change.schedule is not None and not name:
        return ""
    if not _runs_elsewhere(plan) or (split is None and _changes_chunks(change, schedule) and plan.num_chunks > _CHUNKS):
        return ""
    options = {
        "--parallelism.pipeline_parallel_schedule": name if change.schedule is not None else None,
        "--parallelism.pipeline_parallel_microbatch_size": size,
    }
    return "; ".join(part for part in (_joined(options), "" if split is None else split_points(split)) if part)


def _joined(options: Mapping[str, str | None]) -> str:
    return " ".join(f"{name} {value}" for name, value in options.items() if value is not None)


def goes_round(plan: Plan) -> bool:
    """Return whether the stages of the model follow the ranks round and round, rather than there and back on a V."""
    return all(rank == stage % plan.pp for stage, rank in enumerate(plan.placement[: plan.chain_length]))


def megatron_layout(split: Sequence[int], *, has_chunks: bool) -> str:
    """Megatron-LM's options for a split: its layout and, with one stage on each rank, the first and last stage's layers."""
    layout = "|".join(
        f"{'E' * (stage == 0)}{'t' * count if count < 3 else f't*{count}'}{'L' * (stage == len(split) - 1)}"
        for stage, count in enumerate(split)
    )
    ends = (
        f" or --decoder-first-pipeline-num-layers {split[0]} --decoder-last-pipeline-num-layers {split[-1]}"
        if len(set(split[1:-1])) == 1 and not has_chunks
        else ""
    )
    return f'--pipeline-model-parallel-layout "{layout}"{ends}'


def split_points(split: Sequence[int]) -> str:
    """The layers with which torchtitan's parts of the model begin."""
    return f"split points {','.join(f'layers.{index}' for index in list(accumulate(split))[:-1])}"


def paste_lines(split: Sequence[int], *, has_chunks: bool = False, goes_round: bool = True) -> str:
    """The split as an option of this project's runtime, of Megatron-LM, and as split points of torchtitan."""
    return "; ".join(
        f"{framework}: {option}" if framework != PPTRACE else option
        for framework, option in paste_options(split, has_chunks=has_chunks, goes_round=goes_round)
    )


def paste_options(split: Sequence[int], *, has_chunks: bool = False, goes_round: bool = True) -> list[tuple[str, str]]:
    """(framework, what to paste there) of a split; Megatron-LM has layouts of stages that go round the ranks alone."""
    return [
        (PPTRACE, f"--split {','.join(map(str, split))}"),
        *([(MEGATRON, megatron_layout(split, has_chunks=has_chunks))] if goes_round else []),
        (TORCHTITAN, split_points(split)),
    ]
