"""The schedules that each framework runs, and what it calls them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pptrace.analysis.whatif.change import Change
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import SCHEDULES

PPTRACE, MEGATRON, TORCH, TORCHTITAN = "pptrace", "Megatron-LM", "torch.distributed.pipelining", "torchtitan"


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework: its name, and how each schedule of the catalogue that it runs is asked for, "" where nothing has to be said.

    ``{p}`` and ``{twice_p}`` stand for the ranks of the pipeline and their double, ``{chunks}`` for the stages of a rank.
    ``paste`` are the names under which options to paste (:mod:`pptrace.analysis.whatif.paste`) are its own.
    """

    name: str
    schedules: Mapping[str, str]
    paste: tuple[str, ...]

    def lack(self, change: Change, plan: Plan) -> str:
        """The reason why a change that makes a plan is none for this framework; "" where it is one."""
        if self.name == PPTRACE:
            return ""
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
    {"1f1b": "", "interleaved-1f1b": "--num-virtual-stages-per-pipeline-rank {chunks}"},
    (MEGATRON,),
)
_ZERO_BUBBLE = "--enable-zero-bubble --zero-bubble-max-pending-backward"
_V_SCHEDULE = "--zero-bubble-v-schedule"
_V_MEMORY = f"{_V_SCHEDULE} --zero-bubble-v-schedule-mem-setup"

FRAMEWORKS: Mapping[str, Framework] = {
    "pptrace": Framework(PPTRACE, {name: f"--schedule {name}" for name in SCHEDULES}, (PPTRACE,)),
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
