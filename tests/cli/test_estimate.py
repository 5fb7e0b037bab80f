"""``pptrace estimate``: tables, files, sweeps and what it refuses."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

import pptrace as api
from pptrace.errors import PptraceError
from pptrace.schedule.registry import SCHEDULES
from tests.support.programs import pptrace_here
from tests.support.public_models import PUBLIC, config_file

SIZES = ("--layers", "24", "--hidden", "1024", "--heads", "16", "--sequence", "2048", "--vocabulary", "50304", "--tied")
RUN = ("estimate", "1f1b", "--pp", "4", "--microbatches", "8", "--microbatch-size", "2", *SIZES)
GPT = {"layers": 24, "hidden": 1024, "heads": 16, "sequence": 2048, "vocabulary": 50304}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return config_file(tmp_path, LLAMA)


def test_the_table_has_each_ranks_memory_flops_and_bytes() -> None:
    out = pptrace_here(*RUN, "--fits", "5GB", "--tflops", "100", "--link", "pp=25").out
    assert "355,919,872 parameters on 4 ranks (pp 4), 1f1b, 8 microbatches, 2 sequences of 2,048 tokens each" in out
    assert "does not fit 5.0 GB: rank 0 needs" in out
    assert "no speed of embd" not in out, "ends of a tied embedding take the links of the pipeline"
    (row,) = [line.split() for line in out.splitlines() if "129,185,792" in line]
    assert row[:3] == ["0", "6", "129,185,792"]
    (sent,) = [line.split() for line in out.splitlines() if line.startswith("pp    send")]
    assert sent[3:6] == ["16", "134.2", "MB"]  # 2 · 8 messages of 2 · 2048 · 1024 · 2 B
    assert float(sent[-1]) == pytest.approx(134.217728 / 25, abs=0.01)


def test_files_have_what_python_has(tmp_path: Path) -> None:
    table = list(csv.DictReader(io.StringIO(pptrace_here(*RUN, "--csv", "-").out)))
    estimate = json.loads(pptrace_here(*RUN, "--json", "-").out)
    sizes = {"layers": 24, "hidden": 1024, "heads": 16, "sequence": 2048, "vocabulary": 50304, "tied": True}
    run = api.estimate("1f1b", pp=4, microbatches=8, microbatch_size=2, **sizes)
    assert [int(row["total_bytes"]) for row in table] == run.ranks.total_bytes.tolist()
    assert [rank["total_bytes"] for rank in estimate["ranks"]] == run.ranks.total_bytes.tolist()
    assert estimate["peak_bytes"] == run.peak_bytes == max(run.ranks.total_bytes)
    assert estimate["step_ns"] is estimate["fits"] is run.step_ns is None
    assert len(estimate["communication"]) == len(run.communication)


def test_what_a_layer_keeps_is_listed_tensor_by_tensor() -> None:
    """With 16 bits and dropout the terms of arXiv 2205.05198 without its scores, 34·s·b·h, and statistics of rows."""
    sbh = 2048 * 2 * 1024
    tensors = json.loads(pptrace_here(*RUN, "--dropout", "--json", "-").out)["layer_tensors"]
    terms = {name: num_bytes // sbh for name, num_bytes in tensors.items() if num_bytes >= sbh}
    assert sum(terms.values()) == 34
    assert list(terms.items())[:3] == [("mlp_in", 8), ("gelu", 8), ("qkv", 6)]
    assert "a layer keeps 142.9 MB of a microbatch: mlp_in 33.6 MB, " in pptrace_here(*RUN, "--dropout").out
    experts = json.loads(pptrace_here(*RUN, "--experts", "8", "--json", "-").out)["layer_tensors"]
    assert "qkv" in experts
    assert "mlp_in" not in experts
    numbers = ("estimate", "1f1b", "--microbatches=8", "--layers=4", "--layer-parameters=9", "--layer-activations=9")
    for options in ((*RUN, "--attention", "stored"), numbers):
        assert json.loads(pptrace_here(*options, "--json", "-").out)["layer_tensors"] == {}


def test_gradients_that_replicas_share_and_sum_once_a_step_are_said_to_be_whole_until_then() -> None:
    """Four bytes of each parameter of rank 0, of which two replicas have a half: 258.4 MB."""
    words = "keeps 258.4 MB more until then"
    two = (*RUN, "--dp", "2", "--zero")
    assert words in " ".join(pptrace_here(*two, "2").out.split())
    assert "until then" not in pptrace_here(*two, "1").out
    alone = [option if option != "8" else "1" for option in two]
    assert "until then" not in pptrace_here(*alone, "2").out, "the first microbatch is the last one"


def test_sizes_of_experts_that_are_not_there_are_refused() -> None:
    for options in (("--experts-per-token", "3"), ("--expert-ffn", "32")):
        assert f"{options[0]} is for --experts, of which there are none" in pptrace_here(*RUN, *options).err
    few = pptrace_here(*RUN, "--experts", "4", "--experts-per-token", "5").err
    assert "--experts-per-token is 5 of 4 --experts; expected at most all of them" in few


def test_a_family_is_named_as_it_is_written() -> None:
    mlp = json.loads(pptrace_here(*RUN, "--family", "llama", "--json", "-").out)["layer_tensors"]
    assert "gelu" not in mlp
    assert "'gpt', 'llama'" in pptrace_here(*RUN, "--family", "bert").err


def test_the_step_is_that_of_the_closed_form() -> None:
    """With equal stages, free messages and no other communication: (m + p − 1) · (f + b)."""
    flops = 10**14
    layer = {"layer_parameters": 10**9, "layer_activations": 1, "hidden": 64, "sequence": 1000}
    run = api.estimate("1f1b", pp=4, microbatches=8, layers=4, tflops=flops / 1e12, **layer)
    assert run.step_ns == pytest.approx((8 + 3) * 3 * (2 * 1000 * 10**9) / flops * 1e9, rel=1e-6)
    assert run.step.simulation.bubble_ratio == pytest.approx(3 / 8)


def test_layers_by_their_numbers_need_no_sizes_and_what_follows_from_these_is_null_with_its_reason() -> None:
    layer: dict[str, Any] = {"layer_parameters": 10**6, "layer_activations": 1200, "head_parameters": 500}
    mesh: dict[str, Any] = {"pp": 4, "microbatches": 8, "layers": 8, "dp": 2, "tp": 2, "tflops": 1.0}
    known = api.estimate("1f1b", hidden=64, sequence=16, **layer, **mesh)
    run = api.estimate("1f1b", **layer, **mesh)
    null = ["model_flops", "hardware_flops"]
    assert run.ranks.drop(columns=null).equals(known.ranks.drop(columns=null))
    assert (run.ranks[null].isna().all(axis=None), run.step_ns, run.tokens_per_s) == (True, None, None)
    sent, full = run.communication, known.communication
    assert sent.calls.tolist() == full.calls.tolist()
    assert set(sent.axis[sent.bytes.isna()]) == {"pp", "tp"}
    assert sent.bytes[sent.axis == "dp"].tolist() == full.bytes[full.axis == "dp"].tolist() != []
    with_tokens = api.estimate("1f1b", sequence=16, **layer, **mesh)
    assert (with_tokens.step_ns, with_tokens.tokens_per_s) == (known.step_ns, known.tokens_per_s)
    assert api.estimate("1f1b", sequence=16, link="25", **layer, **mesh).step is None, "a message's length is not known"
    reasons = json.loads(run.to_json())["reasons"]
    assert [line.partition(" are not known")[0] for line in reasons] == [
        "without a sequence FLOPs, tokens and the time of a step",
        "without hidden and sequence the bytes along pp, tp",
    ]
    assert json.loads(known.to_json())["reasons"] == []
    sweep = ("estimate", "1f1b", "--sweep", "--pp=2,4", "--microbatches=8", "--layers=8", "--tflops=1")
    swept = ("--layer-parameters=9", "--layer-activations=9")
    without = "without a sequence FLOPs, tokens and the time of a step are not known"
    assert pptrace_here(*sweep, *swept).out.count(without) == 1
    assert json.loads(pptrace_here(*sweep, *swept, "--json", "-").out)["reasons"][0] == without
    with pytest.raises(PptraceError, match="layer_activations needs layer_parameters: layers known by their numbers"):
        api.estimate("1f1b", layer_activations=1200, **mesh)
    for part in ({"ffn": 8}, {"family": "gpt"}, {"vocabulary": 8}, {"attention": "stored"}, {"dropout": True}):
        line = f"{next(iter(part))} changes nothing of a layer known by layer_parameters"
        with pytest.raises(PptraceError, match=line):
            api.estimate("1f1b", **part, **layer, **mesh)
    with pytest.raises(PptraceError, match="recompute is full: a layer keeps its input"):
        api.estimate("1f1b", recompute="full", **layer, **mesh)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_computes_the_same_and_holds_what_its_plan_holds(schedule: str) -> None:
    """With equal layers and no ends, bytes in flight are those of a chunk times the most that the plan holds."""
    layer = {"layer_parameters": 10**6, "layer_activations": 1200, "hidden": 64, "sequence": 16}
    chunks = SCHEDULES[schedule].default_chunks
    run = api.estimate(schedule, pp=4, microbatches=8, layers=8, tflops=1.0, **layer)
    stages = len(run.estimate.facts.layers_per_stage)
    held = api.simulate(schedule, pp=4, microbatches=8).ranks.peak_inflight_microbatches
    assert run.ranks.activations_bytes.tolist() == (held * 1200 * 8 // stages).tolist()
    assert run.ranks.model_flops.sum() == 8 * 8 * 3 * 2 * 16 * 10**6
    assert run.ranks.parameters.sum() == 8 * 10**6 * (chunks * 4 // stages)
    assert run.step_ns is not None


def test_a_sweep_lists_what_fits_with_the_shortest_step_first_and_why_others_do_not(config: Path) -> None:
    swept = ("--pp", "1,2,4", "--tp", "1,2", "--recompute", "none,full", "--sequence", "4096", "--ranks", "8")
    speeds = ("--tflops", "400", "--link", "25", "--link", "tp=300")
    limits = ("--global-batch", "16", "--fits", "80GB")
    options = ("estimate", "1f1b", "--sweep", "--model", config, *swept, *limits, *speeds)
    out = pptrace_here(*options).out
    assert "12 combinations: " in out
    assert "do not fit, such as" in out
    points = json.loads(pptrace_here(*options, "--json", "-").out)["points"]
    assert len(points) == 12
    turned = tuple({"25": "tp=300", "tp=300": "25"}.get(str(option), option) for option in options)
    assert json.loads(pptrace_here(*turned, "--json", "-").out)["points"] == points
    alike = tuple(str(option).replace("tp=300", "pp=25") for option in options)
    assert json.loads(pptrace_here(*alike, "--json", "-").out)["points"] != points, "tp has a speed of its own"
    fitting = [point for point in points if point["fits"]]
    assert fitting == points[: len(fitting)]
    times = [point["rank_ns_per_token"] for point in fitting]
    assert times == sorted(times)
    for point in points:
        assert point["dp"] * point["pp"] * point["tp"] == 8
        assert point["dp"] * point["microbatches"] == 16
        assert (point["peak_bytes"] <= 80e9) is point["fits"] is not bool(point["reason"])
    assert {point["recompute"] for point in fitting} == {"none", "full"}


def test_a_sweep_of_which_nothing_fits_says_so(config: Path) -> None:
    sweep = ("--sweep", "--pp", "2,64", "--microbatches", "8", "--fits", "8GB")
    ended = pptrace_here("estimate", "1f1b", "--model", config, *sweep)
    assert ended.code == 2
    assert "2 combinations: 0 fit" in ended.err
    assert "64 stages need at least 64 layers and the model has 32" in ended.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--pp 4", "--layers is not given; expected it, or --model with it"),
        ("--model CONFIG", "--microbatches is not given"),
        ("--model CONFIG --microbatches 8 --pp 2,4", "--sweep for several values"),
        ("--model CONFIG --microbatches 8 --recompute none,full", "selective, full, or --sweep for several"),
        ("--model CONFIG --microbatches 8 --tp 3", "--tp 3 does not divide heads 32"),
        ("--model CONFIG --microbatches 8 --ep 2 --dp 2", "the model has none; say --experts"),
        ("--model CONFIG --microbatches 8 --link tp=fast", "--link tp=fast: expected GB/s above 0"),
        ("--model CONFIG --microbatches 8 --link 25 --link 9", "--link gives the speed of all axes twice"),
        ("--model CONFIG --microbatches 8 --cp-comm-type all_gather", "of which there is 1; give --cp"),
        ("--model CONFIG --microbatches 8 --zero 4", "--zero is 4; expected at most 3"),
        (
            "--model CONFIG --microbatches 8 --sequence-parallel",
            "--sequence-parallel is for the ranks of tp, which is 1; give it 2 or more with --tp, or leave "
            "--sequence-parallel out",
        ),
        (
            "--sweep --model CONFIG --microbatches 8 --pp 2,4 --sequence-parallel",
            "--sequence-parallel is for the ranks of tp, which is 1",
        ),
        ("--model CONFIG --microbatches 8 --fits many", "expected a size such as 80GB"),
        ("--model CONFIG --microbatches 8 --ranks 8", "--ranks needs --sweep"),
        ("--model CONFIG --microbatches 8 --head-parameters 5", "needs --layer-parameters"),
        ("--model CONFIG --microbatches 8 --fits 0", "--fits is 0; expected more than 0 bytes"),
        ("--model CONFIG --microbatches 8 --layers 0", "--layers is 0; expected at least 1"),
        ("--sweep --pp 1,2 --microbatches 8", "--layers is not given; expected it, or --model with it"),
        ("--sweep --model CONFIG --pp 1,2 --microbatches 8 --tflops -1", "--tflops is -1"),
        ("--model /nowhere.json --microbatches 8", "/nowhere.json: cannot be read (No such file or directory)"),
    ],
)
def test_what_cannot_be_estimated_is_refused_in_one_line(config: Path, options: str, message: str) -> None:
    ended = pptrace_here("estimate", "1f1b", *options.replace("CONFIG", str(config)).split())
    assert ended.code == 2
    assert message in ended.err
    assert len(ended.err.splitlines()) == 1


def test_several_schedules_need_a_sweep(config: Path) -> None:
    for name in ("1f1b,zb-h1", "all"):
        ended = pptrace_here("estimate", name, "--model", str(config), "--pp", "4", "--microbatches", "8")
        assert (ended.code, ended.err) == (2, f"pptrace: {name}: several schedules make a table; add --sweep\n")


def test_options_for_an_axis_of_one_rank_say_so(config: Path) -> None:
    sizes: dict[str, Any] = {"layers": 8, "hidden": 64, "heads": 4, "sequence": 16, "vocabulary": 64, "microbatches": 8}
    swept = api.estimate_sweep("1f1b", tp="1,2", sequence_parallel=True, **sizes)
    assert swept.reason.tolist() == ["", ""], "one of several has the axis"

    def unused(*links: str, **mesh: int) -> list[str]:
        return api.estimate("1f1b", link=links, **mesh, **sizes).unused_links

    assert unused("25", "tp=300", "dp=9", tp=2) == ["dp"]
    assert unused("pp=1", "tp=2", "cp=3", "dp=4", "ep=5", pp=2, dp=2) == ["tp", "cp", "ep"]
    assert unused("dp=300", tp=2, experts=2) == [], "each rank of tp has the same experts"
    given = ("--model", str(config), "--pp", "4", "--microbatches", "8", "--tp", "2", "--link", "tp=3")
    assert "nothing is sent" not in pptrace_here("estimate", "1f1b", *given).out
    line = "nothing is sent along dp, ep: the speeds given for them change nothing."
    assert line in pptrace_here("estimate", "1f1b", *given, "--link", "dp=9", "--link", "ep=9").out.splitlines()


def test_a_config_of_an_unknown_model_needs_its_family(tmp_path: Path) -> None:
    path = config_file(tmp_path, LLAMA | {"model_type": "grok"})
    with pytest.raises(api.PptraceError, match="model_type grok is not known; say family, gpt or llama"):
        api.estimate("1f1b", microbatches=4, model=path)
    config_file(tmp_path, {name: value for name, value in LLAMA.items() if name != "model_type"})
    with pytest.raises(api.PptraceError, match="has no model_type; say family, gpt or llama"):
        api.estimate("1f1b", microbatches=4, model=path)
    assert api.estimate("1f1b", microbatches=4, model=path, family="llama").num_parameters == 8_030_261_248
    config_file(tmp_path, LLAMA | {"model_type": "grok"})
    as_llama = api.estimate("1f1b", microbatches=4, model=path, family="llama")
    assert as_llama.num_parameters == 8_030_261_248
    assert json.loads(as_llama.to_json())["reasons"] == [f"{path}: model_type grok is taken for family llama"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"is_encoder_decoder": True}, "is_encoder_decoder is of layers that are not counted"),
        ({"state_size": 128}, "state_size is of layers that are not counted"),
        ({"linear_num_key_heads": 16}, "linear_num_key_heads is of layers that are not counted"),
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern is of layers that are not counted"),
        ({"moe_num_experts": 64}, "moe_num_experts is of layers that are not counted"),
        ({"index_topk": 2048}, "index_topk is of layers that are not counted"),
        ({"layer_types": ["full_attention", "conv"] * 16}, "layer_types has 'conv', of layers that are not counted"),
        ({"layer_types": ["full_attention"] * 8}, "layer_types has no value for each of 32 layers"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window is None; expected a whole number"),
        ({"use_qk_norm": True}, "use_qk_norm is of a norm that is not counted"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "qk_nope_head_dim is None; expected a whole number"),
        (
            {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "attention_bias": True},
            "attention_bias is of biases that are not",
        ),
        ({"head_dim": "wide"}, "head_dim is 'wide'; expected a whole number"),
        ({"num_experts": 8}, "has no num_experts_per_tok; give experts_per_token"),
        ({"intermediate_size": None}, "has no intermediate_size; give ffn"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": 3}, "mlp_only_layers is no list of layers"),
        ({"hidden_size": None}, "hidden is not given"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; expected true or false"),
        ({"attention_bias": "no"}, "attention_bias is 'no'; expected true or false"),
    ],
)
def test_a_config_that_is_not_counted_is_refused_in_a_line_that_names_the_field(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = config_file(tmp_path, LLAMA | fields)
    for family in (None, "llama"):
        with pytest.raises(api.PptraceError) as refusal:
            api.estimate("1f1b", microbatches=4, model=path, family=family)
        assert message in str(refusal.value)
        assert "\n" not in str(refusal.value)
    numbers = {"layer_parameters": 10**6, "layer_activations": 10**6, "hidden": 64}
    by_numbers = api.estimate("1f1b", microbatches=4, model=path, **numbers)
    assert by_numbers.num_parameters == 32 * 10**6, "layers by their numbers need no field"


def test_a_file_whose_lists_nest_too_deep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[" * 100_000)
    with pytest.raises(api.PptraceError, match="no JSON that can be read"):
        api.estimate("1f1b", microbatches=4, model=path)


def test_that_tp_does_not_cut_experts_is_said() -> None:
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 100}

    def reasons(**more: Any) -> list[str]:
        return list(json.loads(api.estimate("1f1b", microbatches=4, **sizes, **more).to_json())["reasons"])

    assert [line[:22] for line in reasons(tp=2, experts=4)] == ["tp does not cut expert"]
    assert reasons(tp=2) == reasons(experts=4) == []


def test_heads_that_ranks_of_tp_cannot_share_are_refused(tmp_path: Path) -> None:
    heads = {"hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 10, "intermediate_size": 17920}
    path = config_file(tmp_path, LLAMA | heads)
    assert api.estimate("1f1b", microbatches=4, model=path, tp=20).ranks.parameters[0] > 0
    with pytest.raises(api.PptraceError, match="tp 4 neither divides kv_heads 10 nor is a multiple of them"):
        api.estimate("1f1b", microbatches=4, model=path, tp=4)
    config_file(tmp_path, PUBLIC["OLMo 2 7B"].config)
    with pytest.raises(api.PptraceError, match="tp 2 cuts the heads of which this model makes one norm"):
        api.estimate("1f1b", microbatches=4, model=path, tp=2)


def test_formulas_of_stored_scores_are_of_no_other_form(config: Path) -> None:
    assert api.estimate("1f1b", microbatches=4, attention="stored", **GPT).peak_bytes > 0
    others: list[dict[str, Any]] = [{"kv_heads": 8}, {"ffn": 1024}, {"experts": 8}, {"family": "llama"}]
    for other in (*(GPT | other for other in others), {"model": config}):
        with pytest.raises(api.PptraceError, match=r"attention stored takes the formulas of arXiv 2205\.05198"):
            api.estimate("1f1b", microbatches=4, attention="stored", **other)


def test_a_model_with_experts_says_what_is_active_what_each_kind_of_layer_keeps_and_what_is_not_counted(
    tmp_path: Path,
) -> None:
    path = config_file(tmp_path, PUBLIC["DeepSeek-V3"].config)
    given = ("--model", str(path), "--sequence", "4096", "--microbatches", "8", "--pp", "4", "--fits", "80GB")
    out = " ".join(pptrace_here("estimate", "1f1b", *given).out.split())
    assert "671,026,404,352 parameters (37,552,282,624 active for a token) on 4 ranks (pp 4)" in out
    assert "8 microbatches, 1 sequence of 4,096 tokens each" in out
    assert f"{path.name}: num_nextn_predict_layers not counted" in out
    swept = pptrace_here("estimate", "1f1b", "--sweep", *given[:-4], "--pp", "4,8").out
    assert swept.count(f"{path.name}: num_nextn_predict_layers not counted") == 1
    assert "a layer with an MLP keeps 1.5 GB of a microbatch: qkv 536.9 MB, mlp_gate 151.0 MB" in out
    assert "a layer with experts keeps 2.6 GB of a microbatch: experts 1.7 GB, qkv 536.9 MB" in out
    written = json.loads(pptrace_here("estimate", "1f1b", *given, "--json", "-").out)
    assert written["active_parameters"] == 37_552_282_624
    run = api.estimate("1f1b", model=path, sequence=4096, microbatches=8, pp=4, recompute="full")
    dense, with_experts = (run.estimate.layer_bytes(layer, "none") for layer in (0, 3))
    decisions = run.estimate.layer_bytes(3, "full") - 4096 * 7168 * 2
    assert 8 * 8 * 4096 < decisions < 3 * 8 * 8 * 4096 + 4096, "the chosen experts of a token, and places of rows"
    assert run.estimate.recomputed_bytes == with_experts - 4096 * 7168 * 2 - decisions > dense
    shared = 4 * 2048 * 2 * 4096  # four tensors of the shared MLP's inner layer, and the norm's output that it reads
    config_file(tmp_path, {**PUBLIC["DeepSeek-V3"].config, "n_shared_experts": 2})
    two = api.estimate("1f1b", model=path, sequence=4096, microbatches=8, pp=4)
    assert two.estimate.layer_bytes(3, "none") - with_experts == shared


def test_the_bubble_needs_no_speeds(config: Path) -> None:
    """The last stage has the head besides: the step is (m − 1) of its ops, and of each stage one forward and one backward."""
    given = ("estimate", "1f1b", "--model", str(config), "--pp", "4", "--microbatches", "16")
    ranks = json.loads(pptrace_here(*given, "--json", "-").out)["ranks"]
    flops = [rank["model_flops"] / 16 for rank in ranks]
    ratio = 4 * (15 * flops[-1] + sum(flops)) / (16 * sum(flops)) - 1
    out = pptrace_here(*given).out
    assert f"bubble ratio {ratio:.3f} by FLOPs alone (0.188 with equal stages)." in out
    with_speeds = f"bubble ratio {ratio:.3f} (0.188 with equal stages and free messages), "
    assert with_speeds in pptrace_here(*given, "--tflops=9").out


def test_positions_are_those_of_the_file_however_long_sequences_are(tmp_path: Path) -> None:
    path = config_file(tmp_path, PUBLIC["GPT-2"].config)
    made = {length: api.estimate("1f1b", microbatches=4, model=path, sequence=length) for length in (512, 1024, 2048)}
    parameters = {length: run.num_parameters for length, run in made.items()}
    assert parameters == {512: 124_439_808, 1024: 124_439_808, 2048: 124_439_808 + 1024 * 768}


def test_a_logit_that_is_capped_is_kept_once_more(tmp_path: Path) -> None:
    kept = []
    for cap in (None, 30.0):
        path = config_file(tmp_path, PUBLIC["Gemma 2 9B"].config | {"final_logit_softcapping": cap})
        run = api.estimate("1f1b", microbatches=4, model=path, sequence=1024, pp=2)
        kept.append(run.ranks.activations_bytes.tolist())
    assert [after - before for before, after in zip(*kept, strict=True)] == [0, 1024 * 256_000 * 2]


def test_a_ring_says_nothing_of_layers_that_see_a_part_of_the_sequence(tmp_path: Path) -> None:
    path = config_file(tmp_path, PUBLIC["Mistral 7B"].config)
    contexts = [
        json.loads(api.estimate("1f1b", microbatches=4, model=path, sequence=length, cp=2).to_json())["context"]
        for length in (4096, 8192)
    ]
    assert [context is None for context in contexts] == [False, True]
