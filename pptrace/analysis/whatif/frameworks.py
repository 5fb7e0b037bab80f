"""The schedules that each framework runs, and changes as options to paste there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from msgspec import Struct

from pptrace.analysis.whatif.change import Change, layers_of_stages
from pptrace.analysis.whatif.stage_costs import StageCosts
from pptrace.schedule.layout import as_layout
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import SCHEDULES

PPTRACE, MEGATRON, TORCH, TORCHTITAN = "pptrace", "Megatron-LM", "torch.distributed.pipelining", "torchtitan"


class Framework(Struct, frozen=True):
    """A framework: its name, and how each schedule of the catalogue that it runs is asked for, "" where nothing has to be said.

    ``{p}`` and ``{twice_p}`` stand for the ranks of the pipeline and their double, ``{chunks}`` for the stages of a rank.
    ``paste`` are the names under which options to paste (:func:`options_of`) are its own.
    """

    name: str
    schedules: Mapping[str, str]
    paste: tuple[str, ...]

    def lack(self, change: Change, plan: Plan) -> str:
        """The reason why a change that makes a plan is none for this framework; "" where it is one."""
        if self.name == PPTRACE:
            return ""
        if change.order is not None and self.name != TORCH:
            return f"not in {self.name}"
        if change.prefetch is not None or (change.schedule is not None and change.schedule not in self.schedules):
            return f"not in {self.name}"
        makes_stages = change.schedule is not None or change.chunks is not None or change.microbatches is not None
        if makes_stages and not runs_elsewhere(plan):
            return f"not in {self.name}, which runs it with a multiple of {plan.pp} microbatches"
        return ""


def runs_elsewhere(plan: Plan) -> bool:
    """Return whether other runtimes run an interleaved plan in this order: of a last group smaller than p they make others."""
    return plan.num_stages == plan.pp or plan.num_microbatches % plan.pp == 0


_MEGATRON = Framework(
    MEGATRON,
    {
        "1f1b": "",
        "interleaved-1f1b": "--num-virtual-stages-per-pipeline-rank {chunks}",
        "combined-1f1b": "--num-virtual-stages-per-pipeline-rank {chunks} --overlap-moe-expert-parallel-comm",
    },
    (MEGATRON,),
)
_ZERO_BUBBLE = "--enable-zero-bubble --zero-bubble-max-pending-backward"
_V_SCHEDULE = "--zero-bubble-v-schedule"
_V_MEMORY = f"{_V_SCHEDULE} --zero-bubble-v-schedule-mem-setup"

FRAMEWORKS: Mapping[str, Framework] = {
    "pptrace": Framework(PPTRACE, {name: f"--schedule {name}" for name in SCHEDULES}, (PPTRACE, MEGATRON)),
    "torch.distributed.pipelining": Framework(
        TORCH,
        {name: f"Schedule{entry.torch_name}" for name, entry in SCHEDULES.items() if entry.torch_name},
        (TORCH, TORCHTITAN),
    ),
    "megatron-lm": _MEGATRON,
    "megascan": _MEGATRON,
    "deepspeed": Framework("DeepSpeed", {"1f1b": "TrainSchedule"}, ("DeepSpeed",)),
    "zero-bubble": Framework(
        "sail-sg/zero-bubble",
        {
            "1f1b": "",
            "interleaved-1f1b": "",
            "zb-h1": f"{_ZERO_BUBBLE} {{p}}",
            "zb-h2": f"{_ZERO_BUBBLE} {{twice_p}}",
            "zb-auto": f"{_ZERO_BUBBLE} auto",
            "zbv": _V_SCHEDULE,
            "v-half": f"{_V_MEMORY} half",
            "v-min": f"{_V_MEMORY} min",
        },
        ("sail-sg/zero-bubble",),
    ),
    "primus": Framework(
        "Primus",
        {
            "1f1b": "pp_algorithm: 1f1b",
            "interleaved-1f1b": "pp_algorithm: 1f1b-interleaved",
            "zb-h1": "pp_algorithm: zero-bubble",
            "zbv": "pp_algorithm: zbv-formatted",
            "v-half": "pp_algorithm: v-half",
            "v-min": "pp_algorithm: v-min",
        },
        ("Primus",),
    ),
    "nanotron": Framework(
        "nanotron", {"gpipe": "parallelism.pp_engine: afab", "1f1b": "parallelism.pp_engine: 1f1b"}, ("nanotron",)
    ),
    "vescale": Framework(
        "veScale",
        {
            "1f1b": "PipelineScheduleType.SIMPLE_1F1B",
            "interleaved-1f1b": "PipelineScheduleType.INTERLEAVED_1F1B",
            "zbv": "PipelineScheduleType.ZERO_BUBBLE",
        },
        ("veScale",),
    ),
    "pith-train": Framework("PithTrain", {"dualpipe-v": ""}, ("PithTrain",)),
    "deepseek": Framework(
        "DualPipe", {"dualpipe": "dualpipe.DualPipe", "dualpipe-v": "dualpipe.DualPipeV"}, ("DualPipe",)
    ),
}
"""Frameworks by their names in reports. Others run what is not known: tables of ops, traces without labels.

Of Megatron-LM (NeMo trains with it) ``get_forward_backward_func`` has both; of torch ``get_schedule_class``, which torchtitan
takes its schedules from; DeepSpeed trains with ``TrainSchedule`` alone; of sail-sg/zero-bubble, Primus, nanotron and veScale
what their README and options name.
"""

_WITH_OPTIONS = (PPTRACE, MEGATRON, TORCH)
"""Frameworks with options for more than the plan."""


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
    if change.order is not None:
        return {PPTRACE: "--schedule FILE.csv", TORCH: 'schedule._load_csv("FILE.csv", format="compute_comms")'}
    if change.ideals or change.link_speed != 1 or change.collective_speeds or change.placement is not None:
        return {}
    lines = {one.name: _called(one, change, plan) for one in FRAMEWORKS.values() if one.name not in _WITH_OPTIONS}
    is_searched = schedule in SCHEDULES and SCHEDULES[schedule].searches
    if not is_searched:  # a search elsewhere does not know the measured costs
        lines |= _with_sizes(change, schedule, plan, costs, sequences)
    return {framework: line for framework, line in lines.items() if line}


def _called(framework: Framework, change: Change, plan: Plan) -> str:
    """The name in a framework of the plan of a change that is one of the schedule alone; "" of others, and where it has none."""
    if change != Change(schedule=change.schedule, chunks=change.chunks) or framework.lack(change, plan):
        return ""
    call = framework.schedules.get(change.schedule or "", "")
    return call.format(p=plan.pp, twice_p=2 * plan.pp, chunks=plan.num_chunks)


def _with_sizes(
    change: Change, schedule: str, plan: Plan, costs: StageCosts, sequences: int | None
) -> Mapping[str, str]:
    """The options of frameworks that have some for sizes and splits too; "" where these make no such change."""
    again = change.recompute_layers
    lines = {TORCH: _of_torch(change, schedule, plan) if change.work(costs.plan) == 1 and again is None else ""}
    if change.microbatch_size != 1 and sequences is None:
        return lines
    size = None if change.microbatch_size == 1 else str(round((sequences or 1) * change.microbatch_size))
    split = _split(change, plan, costs)
    of_pptrace = {
        "--recompute": None if again is None else "full --recompute-method block" if again else "none",
        "--recompute-num-layers": str(again) if again else None,
        "--schedule": change.schedule if schedule in SCHEDULES else None,
        "--chunks": str(plan.num_chunks) if _changes_chunks(change, schedule) else None,
        "--split": None if split is None else ",".join(map(str, split)),
        "--microbatches": None if change.microbatches is None else str(change.microbatches),
        "--microbatch-size": size,
        "--prefetch": None if change.prefetch is None else str(change.prefetch),
    }
    lines |= {PPTRACE: _joined(of_pptrace)}
    if change.prefetch is None and change.work(costs.plan) == 1:  # the number of microbatches follows from their size
        lines[MEGATRON] = _of_megatron(change, schedule, plan, split, size) if again != 0 else ""
        lines[TORCHTITAN] = _of_torchtitan(change, schedule, plan, split, size) if again is None else ""
    return lines


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


def _of_torch(change: Change, schedule: str, plan: Plan) -> str:
    """The class of the schedule with its number of microbatches, into which torch divides the batch that it is given."""
    framework = FRAMEWORKS[TORCH]
    if change.keeps_plan or schedule not in framework.schedules or framework.lack(change, plan):
        return ""
    stages = "stage" if plan.num_stages == plan.pp else f"[{plan.num_chunks} stages of each rank]"
    return f"{framework.schedules[schedule]}({stages}, n_microbatches={plan.num_microbatches})"


def _of_megatron(change: Change, schedule: str, plan: Plan, split: tuple[int, ...] | None, size: str | None) -> str:
    if schedule not in FRAMEWORKS["megatron-lm"].schedules or not runs_elsewhere(plan):
        return ""
    has_chunks = plan.num_stages > plan.pp
    options = [] if split is None else [megatron_layout(split, has_chunks=has_chunks)]
    if split is None and has_chunks and _changes_chunks(change, schedule):  # a layout tells the virtual stages itself
        options.append(f"--num-virtual-stages-per-pipeline-rank {plan.num_chunks}")
    if change.schedule == "combined-1f1b":
        options.append("--overlap-moe-expert-parallel-comm")
    if change.recompute_layers:
        options.append(
            f"--recompute-granularity full --recompute-method block --recompute-num-layers {change.recompute_layers}"
        )
    return " ".join([*options, _joined({"--micro-batch-size": size})]).strip()


def _of_torchtitan(change: Change, schedule: str, plan: Plan, split: tuple[int, ...] | None, size: str | None) -> str:
    """Without a split torchtitan makes two stages for each rank of an interleaved schedule."""
    name = SCHEDULES[schedule].torch_name if schedule in SCHEDULES else ""
    if change.schedule is not None and not name:
        return ""
    if not runs_elsewhere(plan) or (split is None and _changes_chunks(change, schedule) and plan.num_chunks > _CHUNKS):
        return ""
    if split is not None and not all(split[1:-1]):
        return ""  # a part has a module at least
    options = {
        "--parallelism.pipeline_parallel_schedule": name if change.schedule is not None else None,
        "--parallelism.pipeline_parallel_microbatch_size": size,
        _PARTS: None if split is None else _parts_of_model(split),
    }
    return _joined(options)


def _joined(options: Mapping[str, str | None]) -> str:
    return " ".join(f"{name} {value}" for name, value in options.items() if value is not None)


def megatron_layout(split: Sequence[int], *, has_chunks: bool) -> str:
    """Megatron-LM's options for a split: its layout and, with one stage on each rank, the first and last stage's layers."""
    ends = (
        f" or --decoder-first-pipeline-num-layers {split[0]} --decoder-last-pipeline-num-layers {split[-1]}"
        if len(set(split[1:-1])) == 1 and all(split) and not has_chunks
        else ""
    )
    return f'--pipeline-model-parallel-layout "{as_layout(split)}"{ends}'


_PARTS = "--parallelism.module_fqns_per_model_part"


def _parts_of_model(split: Sequence[int]) -> str:
    """The modules of each part of torchtitan's models, by the names of its Llama."""
    ends = list(accumulate(split))
    parts = [[f"layers.{index}" for index in range(end - size, end)] for size, end in zip(split, ends, strict=True)]
    return " ".join(map(",".join, [["tok_embeddings", *parts[0]], *parts[1:-1], [*parts[-1], "norm", "lm_head"]]))


def paste_options(split: Sequence[int], plan: Plan) -> list[tuple[str, str]]:
    """(framework, what to paste there) of a split over a plan's stages; Megatron-LM has layouts of stages that follow the ranks
    round and round, not there and back on a V, torchtitan parts with a module at least.
    """
    goes_round = all(rank == stage % plan.pp for stage, rank in enumerate(plan.placement[: plan.chain_length]))
    return [
        (PPTRACE, f"--split {','.join(map(str, split))}"),
        *([(MEGATRON, megatron_layout(split, has_chunks=plan.num_stages > plan.pp))] if goes_round else []),
        *([(TORCHTITAN, f"{_PARTS} {_parts_of_model(split)}")] if all(split[1:-1]) else []),
    ]
