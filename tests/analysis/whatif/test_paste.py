"""Options of frameworks that make a change."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from pptrace.analysis.whatif.change import Change, plan_of
from pptrace.analysis.whatif.frameworks import (
    FRAMEWORKS,
    MEGATRON,
    PPTRACE,
    TORCH,
    TORCHTITAN,
    megatron_layout,
    options_of,
    paste_options,
)
from pptrace.analysis.whatif.ideals import parse_ideal
from pptrace.analysis.whatif.stage_costs import StageCosts
from pptrace.schedule.registry import SCHEDULES, build
from tests.analysis.whatif.test_study import costs_of

LAYERS = (3, 2, 2, 1)


def every_option(change: Change, costs: StageCosts | None = None, sequences: int | None = 2) -> dict[str, str]:
    costs = costs or costs_of(layers=LAYERS)
    return dict(options_of(change, change.schedule or "1f1b", plan_of(change, "1f1b", costs), costs, sequences))


def options(change: Change, costs: StageCosts | None = None, sequences: int | None = 2) -> dict[str, str]:
    """The options of frameworks that have some for more than the plan."""
    names = (PPTRACE, MEGATRON, TORCHTITAN)
    return {name: line for name, line in every_option(change, costs, sequences).items() if name in names}


def test_a_split_is_written_as_frameworks_take_it() -> None:
    plan, chunks, on_v = build("1f1b", 4, 8), build("interleaved-1f1b", 2, 4), build("zbv", 2, 4)
    options = dict(paste_options((3, 4, 4, 1), plan))
    assert options[PPTRACE] == "--split 3,4,4,1"
    assert '--pipeline-model-parallel-layout "Et*3|t*4|t*4|tL"' in options[MEGATRON]
    assert "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 1" in options[MEGATRON]
    parts = "--parallelism.module_fqns_per_model_part"
    assert options[TORCHTITAN] == (
        f"{parts} tok_embeddings,layers.0,layers.1,layers.2 layers.3,layers.4,layers.5,layers.6 "
        "layers.7,layers.8,layers.9,layers.10 layers.11,norm,lm_head"
    )
    ends = dict(paste_options((0, 1, 1, 0), plan))
    assert ends[TORCHTITAN] == f"{parts} tok_embeddings layers.0 layers.1 norm,lm_head"
    assert TORCHTITAN not in dict(paste_options((2, 0, 2, 2), plan)), "a part has a module"
    assert "--decoder-first" not in dict(paste_options((3, 4, 5, 1), plan))[MEGATRON]
    assert "--decoder-first" not in dict(paste_options((3, 4, 4, 1), chunks))[MEGATRON]
    assert MEGATRON not in dict(paste_options((3, 4, 4, 1), on_v))


@pytest.mark.parametrize("split", [(3, 4, 4, 1), (1, 2, 10, 12), (1, 1, 1, 2, 2, 2, 3, 3)])
def test_megatron_reads_the_layout_as_the_split(split: tuple[int, ...]) -> None:
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    text = megatron_layout(split, has_chunks=len(split) > 4).split('"')[1]
    stages = [[layer.name for layer in stage] for stage in layouts.PipelineParallelLayerLayout.parse_str_to_list(text)]
    assert [stage.count("decoder") for stage in stages] == list(split)
    assert stages[0][0] == "embedding"
    assert stages[-1][-1] == "loss"


def test_a_schedule_with_chunks_has_its_even_split() -> None:
    assert options(Change(schedule="interleaved-1f1b")) == {
        PPTRACE: "--schedule interleaved-1f1b --chunks 2 --split 1,1,1,1,1,1,1,1",
        MEGATRON: '--pipeline-model-parallel-layout "Et|t|t|t|t|t|t|tL"',
        TORCHTITAN: "--parallelism.pipeline_parallel_schedule Interleaved1F1B "
        "--parallelism.module_fqns_per_model_part tok_embeddings,layers.0 layers.1 layers.2 layers.3 layers.4 layers.5 "
        "layers.6 layers.7,norm,lm_head",
    }
    assert options(Change(schedule="interleaved-1f1b"), costs_of()) == {
        PPTRACE: "--schedule interleaved-1f1b --chunks 2",
        MEGATRON: "--num-virtual-stages-per-pipeline-rank 2",
        TORCHTITAN: "--parallelism.pipeline_parallel_schedule Interleaved1F1B",
    }


def test_other_runtimes_have_no_options_for_orders_that_they_refuse_or_change() -> None:
    """Megatron-LM refuses a last group smaller than p, torch makes equal groups; without a split torchtitan has two chunks."""
    assert options(
        Change(schedule="interleaved-1f1b", microbatches=6, microbatch_size=8 / 6), costs_of(), sequences=6
    ) == {PPTRACE: "--schedule interleaved-1f1b --chunks 2 --microbatches 6 --microbatch-size 8"}
    four = options(Change(schedule="interleaved-1f1b", chunks=4), costs_of())
    assert four == {
        PPTRACE: "--schedule interleaved-1f1b --chunks 4",
        MEGATRON: "--num-virtual-stages-per-pipeline-rank 4",
    }


def test_frameworks_without_a_schedule_are_left_out() -> None:
    assert options(Change(schedule="zb-h1")) == {PPTRACE: "--schedule zb-h1"}
    assert options(Change(schedule="gpipe")) == {
        PPTRACE: "--schedule gpipe",
        TORCHTITAN: "--parallelism.pipeline_parallel_schedule GPipe",
    }


def test_microbatches_of_another_size_are_in_sequences() -> None:
    assert options(Change(microbatches=16, microbatch_size=0.5)) == {
        PPTRACE: "--microbatches 16 --microbatch-size 1",
        MEGATRON: "--micro-batch-size 1",
        TORCHTITAN: "--parallelism.pipeline_parallel_microbatch_size 1",
    }
    assert options(Change(microbatches=16, microbatch_size=0.5), sequences=None) == {}


def test_torch_is_given_the_class_of_the_schedule_and_the_number_of_microbatches() -> None:
    assert every_option(Change(schedule="zbv"))[TORCH] == (
        "ScheduleZBVZeroBubble([2 stages of each rank], n_microbatches=8)"
    )
    halved = Change(microbatches=16, microbatch_size=0.5)
    assert every_option(halved, sequences=None) == {TORCH: "Schedule1F1B(stage, n_microbatches=16)"}
    assert TORCH not in every_option(Change(microbatches=16)), "more work is another batch"
    assert TORCH not in every_option(Change(schedule="zb-h1"))
    assert TORCH not in every_option(Change())


def test_other_frameworks_are_told_the_plan_in_their_own_words() -> None:
    assert every_option(Change(schedule="zb-h2"))["sail-sg/zero-bubble"] == (
        "--enable-zero-bubble --zero-bubble-max-pending-backward 8"
    )
    of_v = every_option(Change(schedule="v-half"))
    assert of_v["sail-sg/zero-bubble"] == "--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup half"
    assert of_v["Primus"] == "pp_algorithm: v-half"
    assert every_option(Change(schedule="combined-1f1b"))["Megatron-LM"].endswith("--overlap-moe-expert-parallel-comm")
    assert every_option(Change(schedule="gpipe"))["nanotron"] == "parallelism.pp_engine: afab"
    assert not {"DeepSpeed", "nanotron", "veScale"} & every_option(Change(schedule="zb-h1")).keys()


def test_a_framework_runs_schedules_of_the_catalogue_and_lacks_the_others() -> None:
    costs = costs_of(microbatches=6)
    for framework in FRAMEWORKS.values():
        assert framework.schedules.keys() <= SCHEDULES.keys()
        for name in SCHEDULES:
            change = Change(schedule=name)
            lack = framework.lack(change, plan_of(change, "1f1b", costs_of()))
            assert lack == ("" if name in framework.schedules else f"not in {framework.name}")
    change = Change(schedule="interleaved-1f1b")
    assert FRAMEWORKS["megatron-lm"].lack(change, plan_of(change, "1f1b", costs)) == (
        "not in Megatron-LM, which runs it with a multiple of 4 microbatches"
    )
    assert FRAMEWORKS["pptrace"].lack(change, plan_of(change, "1f1b", costs)) == ""
    assert FRAMEWORKS["deepspeed"].lack(Change(prefetch=1), costs.plan) == "not in DeepSpeed"
    assert FRAMEWORKS["deepspeed"].lack(Change(split=(3, 2, 2, 1)), costs.plan) == ""


def test_more_work_and_earlier_receives_are_options_of_the_runtime_alone() -> None:
    assert options(Change(microbatches=16)) == {PPTRACE: "--microbatches 16"}
    assert options(Change(prefetch=2)) == {PPTRACE: "--prefetch 2"}


@pytest.mark.parametrize(
    "change",
    [
        Change(link_speed=2.0),
        Change(ideals=(parse_ideal("jitter"),)),
        Change(placement=(3, 2, 1, 0)),
        Change(schedule="zb-auto"),
    ],
)
def test_no_option_makes_links_faster_or_ops_ideal_or_knows_what_was_searched_for(change: Change) -> None:
    assert options(change) == {}


def test_torch_has_the_schedules_that_are_named_as_its_own() -> None:
    named = {name: entry.torch_name for name, entry in SCHEDULES.items() if entry.torch_name}
    assert len(named) == 7
    for name, torch_name in named.items():
        assert FRAMEWORKS[TORCH].schedules[name] == get_schedule_class(torch_name).__name__
        words = get_schedule_class(torch_name).__name__.lower()
        assert name.replace("-", "") in words.replace("zerobubble", "zb") or (name, torch_name) == (
            "zbv",
            "ZBVZeroBubble",
        )
