"""The example trains, and tells a mistake in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from instrument.examples import train_gpt
from instrument.examples.gpt_arguments import make_parser
from instrument.examples.gpt_settings import RankInfo, resolve_settings
from instrument.examples.train_gpt import main
from pptrace.schedule.lower import lower
from pptrace.schedule.registry import build
from pptrace.schedule.text import to_csv
from tests.support.graph_imitation import Graph, capturing_on
from tests.support.programs import EXAMPLE, torchrun

SMALL = ["--layers", "4", "--hidden", "16", "--heads", "2", "--seq", "16", "--microbatches", "4"]


def pretend(monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    """Set what a launcher sets for one rank of a node."""
    for name, value in (("RANK", rank), ("WORLD_SIZE", world), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", world)):
        monkeypatch.setenv(name, str(value))


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def losses(output: str) -> list[float]:
    return [float(result) for result in re.findall(r"loss +([\d.]+)", output)]


def test_one_process_trains_and_the_loss_falls(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--steps", "8", "--lr", "0.01"]) == 0
    seen = losses(capsys.readouterr().out)
    assert len(seen) == 8
    assert seen[-1] < seen[0] - 0.5


def test_captured_stages_train_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On CPUs, which the command line refuses."""
    arguments = [*SMALL, "--schedule", "interleaved-1f1b", "--chunks", "2", "--steps", "3"]
    monkeypatch.setattr("instrument.examples.gpt_settings.check_graphs", lambda *_: None)
    monkeypatch.setattr(Graph, "num_replays", 0)
    seen = []
    for graphs in ([], ["--cuda-graphs"]):
        with capturing_on(torch.device("cpu")):
            assert main([*arguments, *graphs]) == 0
        seen.append(losses(capsys.readouterr().out))
    assert len(seen[0]) == 3
    assert seen[0] == seen[1]
    assert Graph.num_replays == 3 * 2 * 2 * 4  # steps, directions, chunks, microbatches
    options = make_parser().parse_args([*arguments, "--cuda-graphs"])
    assert train_gpt._gpt_facts(resolve_settings(options, RankInfo(0, 1, 0, 1)), options).graphs


def test_a_global_batch_is_shared_out_over_replicas_and_microbatches() -> None:
    for dp, size, expected in ((1, 2, 8), (2, 2, 4), (4, 1, 4)):
        sizes = {"--dp": dp, "--microbatch-size": size, "--global-batch-size": 16}
        options = make_parser().parse_args([str(part) for pair in sizes.items() for part in pair])
        settings = resolve_settings(options, RankInfo(0, 4, 0, 4))
        assert settings.plan.num_microbatches == expected
        assert (settings.shape.pp, settings.shape.dp) == (4 // dp, dp)


def test_a_preset_says_what_it_sets_and_what_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    like = [*SMALL, "--steps", "1", "--like", "megatron"]
    assert main(like) == 0
    assert (
        "--like megatron: --p2p-calls megatron --p2p-mode batched --p2p-sync --prefetch 0\n" in capsys.readouterr().out
    )
    assert main([*like, "--schedule", "interleaved-1f1b", "--chunks", "2", "--p2p-mode", "batched"]) == 0
    line = "--like megatron: --p2p-calls megatron-overlap --no-p2p-sync --prefetch 0; as given: --p2p-mode batched\n"
    assert line in capsys.readouterr().out
    for given, why in (
        (["--prefetch", "2"], "neither --prefetch nor"),
        (["--schedule", "zb-h1"], "use --p2p-calls plan"),
        (["--p2p-calls", "megatron-overlap"], "refuses overlap_p2p_comm without chunks"),
        (["--overlap-param-gather"], "is for --zero 1"),
        (["--zero", "2", "--grad-reduce", "after"], "--grad-reduce is for --zero 0 and 1"),
    ):
        assert main([*like, *given]) == 2
        assert why in capsys.readouterr().err


def test_utilisation_and_memory_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--peak-tflops", "0.5", "--recompute-microbatches-beyond", "0", "--memory"]
    assert main([*SMALL, "--steps", "2", *given]) == 0
    printed = capsys.readouterr().out
    assert "MFU: of 0.5 TFLOP/s per rank (--peak-tflops)" in printed
    assert len(re.findall(r"tokens/s .* GFLOP/s   MFU [\d.]+ %   HFU [\d.]+ %\n", printed)) == 2
    assert re.search(r"memory   rank 0   in flight 1 \(planned 1\)   deferred W 0 \(planned 0\)   activations", printed)
    predicted = re.search(
        r"memory   rank 0   predicted ([\d.]+) MiB for each in flight: layers ([\d.]+) \([\d.]+ a layer\), ", printed
    )
    measured = re.search(r"([\d.]+) MiB for each in flight\n", printed)
    assert 0 < float(predicted[2]) < float(predicted[1]) <= float(measured[1]) < 1.05 * float(predicted[1])
    assert "embedding and head 0.0" in printed
    assert "(scaled_dot_product_attention, flash kernel)   arXiv 2205.05198: layers 0.0" in printed


def test_memory_of_an_attention_that_keeps_its_scores_is_not_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert main([*SMALL, "--steps", "1", "--memory"]) == 0
    reason = "the attention ran without a fused kernel, and what it stores is not known"
    printed = capsys.readouterr().out
    assert f"predicted nothing, because {reason} (scaled_dot_product_attention, math kernel)   arXiv" in printed


@pytest.mark.parametrize(
    "given",
    [
        ["--dispatcher", "padded", "--aux-loss", "0.1"],
        ["--shared-expert-width", "8", "--sleep-forward", "0.1"],
        ["--recompute", "full"],
    ],
    ids=str,
)
def test_memory_of_experts_is_predicted_by_the_rows_of_the_measured_step(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one microbatch to the byte; of several by the mean of their rows."""
    alike = [*SMALL[:-2], "--microbatches", "1", "--experts", "4", "--expert-every", "2"]
    assert main([*alike, *given, "--steps", "1", "--memory"]) == 0
    printed = capsys.readouterr().out
    measured = re.search(r"([\d.]+) MiB for each in flight\n", printed)
    predicted = re.search(r"predicted ([\d.]+) MiB for each in flight, by the rows of experts in this step", printed)
    assert float(measured[1]) == pytest.approx(float(predicted[1]), abs=0.0011)
    assert "arXiv" not in printed


def test_memory_of_a_router_that_sees_noise_is_not_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--steps", "1", "--memory", "--experts", "4", "--router-jitter", "0.1"]) == 0
    assert "predicted nothing, because the router sees noise, and what that keeps is not" in capsys.readouterr().out


def test_memory_of_split_backwards_has_what_their_second_half_reads() -> None:
    given = [*SMALL, "--schedule", "zb-h1", "--steps", "1", "--memory"]
    done = torchrun(2, EXAMPLE, *given)
    assert done.code == 0, done.err
    measured = dict(re.findall(r"rank (\d)   in flight .* ([\d.]+) MiB for each in flight\n", done.out))
    predicted = dict(
        re.findall(r"rank (\d)   predicted ([\d.]+) MiB for each in flight with what W reads: without it", done.out)
    )
    assert measured.keys() == predicted.keys() == {"0", "1"}
    for rank, value in measured.items():
        assert 0.85 * float(value) < float(predicted[rank]) <= float(value)


def test_a_cut_by_measured_times_can_be_made_again_from_their_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "times.json")
    given = [*SMALL, "--schedule", "interleaved-1f1b", "--chunks", "2", "--steps", "1"]
    assert main([*given, "--balance", "--save-layer-times", path]) == 0
    measured = losses(capsys.readouterr().out)
    assert main([*given, "--layer-times", path]) == 0
    assert losses(capsys.readouterr().out) == measured
    assert main([*given, "--layer-times", path, "--hidden", "32"]) == 2
    assert "measure anew" in capsys.readouterr().err


@pytest.mark.parametrize("is_lowered", [False, True])
def test_two_ranks_train_a_plan_from_a_file(
    is_lowered: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = build("zbv", 2, 4)
    path = tmp_path / "handwritten.csv"
    text = to_csv(lower(plan) if is_lowered else plan)
    path.write_text(f"0UNSHARD,{text}" if is_lowered else text)
    posting = ["--prefetch", "1"] if is_lowered else ["--p2p-mode", "blocking"]
    done = torchrun(2, EXAMPLE, *SMALL[:-2], "--schedule", path, "--steps", "2", "--tied", *posting)
    assert done.code == 0, done.err
    assert "Warning" not in done.err
    assert ("UNSHARD of the plan are passed over" in done.out) == is_lowered
    assert main([*SMALL, "--steps", "2", "--tied"]) == 0
    assert losses(done.out) == pytest.approx(losses(capsys.readouterr().out), abs=2e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pp", "4"], "has 2 where ranks of each pipeline is 4; leave it out or choose 2"),
        (["--pp", "2", "--microbatches", "5"], "has 4 where --microbatches is 5"),
        (["--pp", "2", "--chunks", "1"], "has 2 where --chunks is 1"),
        (["--pp", "2", "--group-size", "2"], "--group-size, --lean and --memory-limit shape named schedules"),
    ],
)
def test_arguments_that_contradict_a_plan_file_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "handwritten.csv"
    path.write_text(to_csv(build("zbv", 2, 4)))
    pretend(monkeypatch, 0, 4)
    assert main(["--schedule", str(path), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "world", "message"),
    [
        ("--pp 3", 4, "pp=3 does not divide the world of 4 ranks; choose sizes whose product is 4"),
        ("--layers 3", 4, "4 stages need at least 4 layers and the model has 3"),
        ("--pp 2 --dp 1", 4, "pp=2 fills 2 of 4 ranks; choose sizes whose product is 4"),
        ("--tp 0", 4, "tp is 0; every axis of the mesh needs at least 1 rank"),
        ("--tp 4 --heads 6", 4, "6 attention heads do not divide among 4 tensor-parallel ranks"),
        ("--kv-heads 3", 1, "4 attention heads do not divide among 3 KV heads; choose a divisor of 4"),
        ("--tp 4 --heads 12 --kv-heads 3", 4, "3 KV heads neither divide among 4 tensor-parallel ranks"),
        ("--vocabulary 255", 1, "--vocabulary is 255; expected at least 256, one id for each byte"),
        ("--make-vocab-size-divisible-by 0", 1, "--make-vocab-size-divisible-by is 0; expected at least 1"),
        ("--layout Et*4|t*3,mL", 2, "--layout Et*4|t*3,mL: m is a layer of multi-token prediction (MTP)"),
        ("--sleep-head 3", 1, "--sleep-head is 3.0; expected more than 0 times what a layer sleeps"),
        ("--cp 2 --seq 66", 4, "sequence length 66 is not divisible by 2·cp = 4"),
        ("--cp 2 --ulysses 2 --seq 63", 4, "sequence length 63 is not divisible by cp = 2"),
        ("--tp 2 --sequence-parallel --seq 63", 4, "sequence length 63 does not divide into sequence shards"),
        (
            "--tp 4 --cp 2 --sequence-parallel --seq 20",
            8,
            "20, 10 for each of cp=2, does not divide into sequence shards for tp=4 ranks; choose a multiple of 8",
        ),
        ("--heads 0", 1, "--heads is 0; expected at least 1"),
        ("--seq 0", 1, "--seq is 0; expected at least 1"),
        ("--encoder-layers 2 --encoder-seq 0", 1, "--encoder-seq is 0; expected at least 1"),
        ("--cp 4 --ulysses 3", 4, "ulysses=3 does not divide cp=4; choose a divisor of 4"),
        ("--cp 4 --ulysses 4 --heads 6", 4, "6 heads do not divide among 4 Ulysses ranks"),
        ("--cp 4 --ulysses 4 --heads 12 --kv-heads 3", 4, "3 KV heads neither divide among 4 Ulysses ranks"),
        ("--ulysses 2", 4, "--ulysses is 2 and cp is 1; it says how many ranks of cp exchange heads"),
        ("--sequence-parallel", 4, "--sequence-parallel is for the ranks of tp, which is 1; give it 2 or more"),
        (
            "--tp 4 --scatter-gather-tensors",
            4,
            "--scatter-gather-tensors is for messages between the ranks of pp, which is 1",
        ),
        ("--overlap", 4, "--overlap is for the ranks of tp, which is 1; give it 2 or more"),
        ("--order tp-xx", 4, "the order of axes is 'tp-xx'; expected tp, cp, dp and pp, fastest first"),
        ("--microbatch-size 0", 1, "--microbatch-size is 0; expected at least 1"),
        ("--schedule dualpipe --microbatches 3", 4, "expected an even number, at least 2p=8"),
        ("--zero 1", 4, "ZeRO-1 shards over dp × cp, which has one rank"),
        ("--zero 2 --pp 2 --schedule zb-h1", 4, "ZeRO-2 frees weights after a backward, and zb-h1"),
        ("--zero 3 --tp 2 --dp 2 --kv-heads 1", 4, "ZeRO-3 cuts rows of 1 KV heads"),
        ("--bucket-mb 0", 1, "--bucket-mb is 0.0; expected MiB of gradients a call"),
        ("--bucket-mb nan", 1, "--bucket-mb is nan; expected MiB"),
        ("--bucket-mb inf", 1, "--bucket-mb is inf; expected MiB"),
        ("--zero 2 --dp 4 --bucket-mb 1", 4, "--bucket-mb is for --zero 0 and 1"),
        (
            "--dp 2 --global-batch-size 10",
            4,
            "--global-batch-size is 10 sequences, which 2 replicas with microbatches of 2 do not divide; choose a multiple of 4",
        ),
        ("--global-batch-size 0", 1, "--global-batch-size is 0 sequences"),
        ("--global-batch-size 8 --microbatches 3", 1, "--microbatches is 3 and --global-batch-size 8 makes 4"),
        ("--dropout 1", 1, "dropout is 1.0; expected a probability from 0 up to, not including, 1"),
        ("--hidden 97", 4, "hidden size 97 does not divide into 4 heads"),
        ("--schedule nosuch", 4, "schedule 'nosuch' is not known"),
        ("--split 3,3", 2, "split 3,3 has 6 layers"),
        ("--split 3,x", 2, "--split 3,x: expected layers of each stage such as 3,4,4,1"),
        ("--layout 3,x", 2, "--layout 3,x: expected layers of each stage such as 3,4,4,1"),
        ("--first-layers -1", 2, "--first-layers is -1; expected a number of layers, at least 0"),
        (
            "--decoder-last-pipeline-num-layers=x",
            2,
            "--decoder-last-pipeline-num-layers is x; expected a number of layers, at least 0",
        ),
        ("--steps 0", 1, "--steps is 0"),
        ("--eval-interval 0", 1, "--eval-interval is 0; expected at least 1"),
        ("--variable-seq-lengths 24", 1, "--variable-seq-lengths: a rank learns from a message's shape how long it is"),
        ("--variable-seq-lengths 22 --cp 2 --negotiate", 2, "expected from 1 to --seq 64, and a multiple of 4"),
        ("--variable-seq-lengths 8 --negotiate --balance", 1, "with --balance, which is for one length"),
        ("--encoder-layers 8", 1, "8 of 8 layers are the encoder's; expected 0 or more, one left for the decoder"),
        ("--encoder-layers 2 --cp 2", 2, "--encoder-layers with --cp 2: ranks of cp share one causal sequence"),
        ("--encoder-layers 2 --tied", 1, "an encoder and its decoder have an embedding each and no experts"),
        ("--encoder-layers 2 --balance", 1, "--encoder-layers with --balance, which takes all layers for equal"),
        ("--encoder-layers 2 --encoder-seq 9 --tp 2 --sequence-parallel", 2, "sequence length 9 does not divide"),
        ("--encoder-seq 8", 1, "the encoder has a sequence length and no layers"),
        ("--packed 65", 1, "--packed is 65; expected documents of at least 1 token, and at most --seq 64"),
        ("--packed 8 --cp 2", 2, "--packed with --cp 2: ranks of cp share whole sequences, not documents"),
        ("--packed 8 --encoder-layers 2", 1, "--packed with --encoder-layers, which is for sequences of one document"),
        ("--eval-iters 2", 1, "--eval-iters says how many batches an evaluation has; say when"),
        (
            "--eval-interval 2 --clip-grad 1 --optimizer-sync post-validation",
            1,
            "--eval-interval: with --optimizer-sync post-validation an update is not certain until the next step",
        ),
        ("--recompute some", 1, "invalid choice: 'some' (choose from"),
        ("--recompute full --recompute-num-layers 0", 1, "--recompute-num-layers is 0; expected at least 1"),
        ("--lr nan", 1, "--lr is nan; expected more than 0"),
        ("--lr 100", 1, "--lr is 100.0; expected more than 0 and less than 100"),
        ("--schedule nosuch.csv", 2, "nosuch.csv: "),
        ("--split 4,4 --count-loss", 2, "give the split alone"),
        ("--first-layers 7", 4, "8 layers on 4 stages with 7 in the first rank leave 1 for 3 stages"),
        ("--prefetch 1 --p2p-mode blocking", 2, "nothing to post ahead"),
        ("--prefetch 1 --negotiate", 2, "use --prefetch 0"),
        ("--clip-grad -1", 2, "cannot be clipped to a norm of -1.0; expected a positive number"),
        ("--optimizer-sync post-validation", 2, "give it one with --clip-grad"),
        ("--balance --split 4,4", 2, "leave out --split, counts and ends"),
        ("--balance --layer-times x.json", 2, "give one of the two"),
        ("--save-layer-times x.json", 2, "writes what --balance measures; give both"),
        ("--balance --save-layer-times no/such/x.json", 2, "whose folder does not exist"),
        ("--layer-times nosuch.json", 2, "nosuch.json: No such file"),
        ("--recompute-microbatches-beyond -1", 2, "expected 0 or more outstanding microbatches"),
        ("--recompute-microbatches-beyond 1 --recompute full", 2, "--recompute full recomputes every microbatch"),
        ("--recompute-num-layers 2", 2, "--recompute-num-layers is for --recompute full, and that is none"),
        ("--recompute selective --recompute-modules moe", 1, "expected one or several of core_attn, mlp"),
        (
            "--recompute full --recompute-method block --balance",
            1,
            "--recompute-method block recomputes some layers alone",
        ),
        ("--peak-tflops 0", 1, "--peak-tflops is 0.0; expected"),
        ("--sleep-weight 1", 1, "--sleep-weight is a part of --sleep-backward"),
        ("--lean", 2, "1f1b: microbatch groups and the lean warmup belong to interleaved schedules"),
        ("--memory-limit 2", 2, "a memory limit belongs to zb-auto"),
        ("--schedule interleaved-1f1b --group-size 9", 4, "expected p ≤ group size ≤ m"),
        ("--sleep-forward -1", 1, "--sleep-forward, --sleep-backward and --sleep-rows take milliseconds from 0 up"),
        ("--dp 4 --ep 4 --experts 6", 4, "6 experts do not divide among ep=4 ranks; choose a multiple of 4"),
        ("--dp 4 --ep 3 --experts 6", 4, "ep=3 does not divide the 4 ranks of a stage (dp · cp · tp)"),
        ("--dp 4 --ep 2", 4, "--ep is for a model with experts; give it some with --experts"),
        ("--aux-loss 0.1", 1, "--aux-loss is for a model with experts"),
        ("--experts 4,x", 1, "--experts is '4,x'; expected a number"),
        ("--dp 4 --ep 2 --etp 4 --experts 6", 4, "ep=2 · etp=4 does not divide the 4 ranks"),
        ("--dp 4 --etp 2", 4, "--etp is for a model with experts"),
        ("--dp 4 --etp 4 --experts 6 --expert-width 6", 4, "of width 6 do not divide among etp=4"),
        ("--dp 4 --ep 2 --experts 4,6,7,8 --layers 4", 4, "7 experts do not divide among ep=2"),
        ("--experts 4,8 --layers 3", 1, "2 numbers of experts are given and 3 layers have experts"),
        ("--experts 4 --replay-routes /nowhere.npy", 1, "routes cannot be read from /nowhere.npy"),
        (
            "--experts 4 --replay-routes /nowhere.npy --force-routes hot",
            1,
            "--replay-routes gives the routes that --force-routes gives",
        ),
        ("--experts 8 --drop-order weights", 1, "--drop-order is for experts with a capacity"),
        ("--overlap-experts", 1, "--overlap-experts is for a model with experts"),
        ("--grouped-experts", 1, "--grouped-experts is for a model with experts"),
        ("--experts 4 --tp 4 --seq 66", 4, "66 tokens of a sequence do not divide among tp=4 ranks"),
        (
            "--experts 4 --tp 4 --shared-expert-width 6",
            4,
            "a shared MLP of width 6 does not divide among tp=4 ranks; choose a multiple of 4",
        ),
        ("--experts 4 --dp 4 --zero 2", 4, "ZeRO-2 shards all parameters over the same replicas, and experts"),
        ("--experts 4 --balance", 2, "take all layers for equal, and layers with experts are not; use --split"),
        ("--cuda-graphs", 1, "--cuda-graphs needs a GPU, and this run is on CPUs"),
        ("--cuda-graphs --schedule zbv", 2, "captures a forward and a whole backward, and zbv splits backwards"),
        ("--cuda-graphs --schedule combined-1f1b --pp 2", 2, "and combined-1f1b has pairs of both"),
        ("--cuda-graphs --tp 2", 2, "--cuda-graphs with --tp 2: calls between its ranks would lie in a graph"),
        ("--cuda-graphs --cp 2", 2, "--cuda-graphs with --cp 2"),
        ("--cuda-graphs --experts 4", 1, "--cuda-graphs with --experts, which is another for every microbatch"),
        ("--cuda-graphs --dropout 0.1", 1, "--cuda-graphs with --dropout"),
        ("--cuda-graphs --packed 8", 1, "--cuda-graphs with --packed"),
        ("--cuda-graphs --variable-seq-lengths 8 --negotiate", 1, "--cuda-graphs with --variable-seq-lengths"),
        (
            "--cuda-graphs --dp 2 --zero 1 --overlap-param-gather",
            2,
            "--overlap-param-gather, which acts between operators",
        ),
        ("--cuda-graphs --offload-activations", 1, "--cuda-graphs with --offload-activations"),
        ("--cuda-graphs --sleep-backward 1", 1, "--cuda-graphs with --sleep-backward"),
        ("--cuda-graphs --memory", 1, "--memory, which watches operators, of which a replay calls none"),
        ("--cuda-graphs --encoder-layers 2", 1, "--encoder-layers, which has stages of two inputs"),
        ("--cuda-graphs --recompute selective", 1, "--cuda-graphs with recompute"),
        ("--cuda-graphs --recompute-microbatches-beyond 0", 1, "--cuda-graphs with recompute"),
        ("--cuda-graphs --dp 2 --zero 2", 2, "leaves parameters where they are, and with --zero 2 they come and go"),
        (
            "--experts 4 --expert-every 2 --recompute-microbatches-beyond 1",
            1,
            "--recompute-microbatches-beyond takes all layers for equal",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(
    arguments: str, world: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, 0, world)
    assert main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_a_broken_plan_is_refused_before_any_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.csv"
    path.write_text("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n")
    pretend(monkeypatch, 0, 2)
    assert main(["--schedule", str(path)]) == 2
    printed = capsys.readouterr()
    assert "rank 1 never receives it" in printed.err
    assert printed.err.count("\n") == 1
    assert not dist.is_initialized()


def test_only_rank_zero_tells_the_mistake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The others wait for it, or to be stopped."""
    monkeypatch.setattr(train_gpt, "REFUSAL_S", 0.01)
    pretend(monkeypatch, 1, 4)
    assert main(["--pp", "3"]) == 2
    assert capsys.readouterr().err == ""
