"""The command line of the GPT example, by topic."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from instrument.context.shard import KeyExchange, Layout
from instrument.examples.expert_arguments import Add, add_experts
from instrument.examples.faults import Fault
from instrument.models.gpt_config import NUM_BYTES, Recompute, RecomputeMethod, RecomputeModule
from instrument.optim.buckets import BUCKET_BYTES
from instrument.optim.clipping import OptimizerSync
from instrument.optim.gradient_sync import Reduce
from instrument.optim.main_parameters import Zero
from instrument.pipeline.megatron_calls import Calls
from instrument.pipeline.transport import Mode
from pptrace.errors import UsageError
from pptrace.schedule.layout import read_split

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
BACKENDS = ("auto", "gloo", "nccl", "host-staged", "nccl-shared")
DEFAULT_MICROBATCHES = 8
DEFAULT_PREFETCH = 2
MEGATRON = "megatron"
DEFAULT_BUCKET_MB = BUCKET_BYTES / 2**20


def _add_mesh(add: Add) -> None:
    add("--pp", type=int, help="pipeline ranks; left out: all ranks that --dp leaves")
    add("--dp", type=int, help="data-parallel replicas; left out: all ranks that --pp leaves")
    add("--tp", type=int, default=1, help="tensor-parallel ranks: heads, MLP and vocabulary are sharded")
    add("--cp", type=int, default=1, help="context-parallel ranks: sequences are sharded")
    add("--ep", type=int, default=1, metavar="N", help="expert-parallel ranks, of dp × cp × tp: they share --experts")
    add("--etp", type=int, default=1, metavar="N", help="expert-tensor-parallel ranks: N of them share each expert")
    add(
        "--order",
        default="tp-cp-dp-pp",
        help="which axis varies fastest from rank to rank (first) and which slowest; axes left out vary slowest; with ep "
        "(tp-cp-ep-dp-pp) tp, ep and dp say so of etp, ep and their replicas too, as in Megatron-LM",
    )
    add("--sequence-parallel", action="store_true", help="shard activations between the layers over tp (Megatron SP)")
    add("--overlap", action="store_true", help="overlap tensor-parallel communication with the matrix products")
    add("--ulysses", type=int, default=1, metavar="N", help="of cp, ranks that exchange heads; the others form rings")
    add(
        "--cp-comm-type",
        choices=list(map(str, KeyExchange)),
        default=str(KeyExchange.P2P),
        help="how keys reach the ranks of a ring: they rotate, or each rank gathers all of them",
    )
    add(
        "--cp-layout",
        choices=list(map(str, Layout)),
        default=str(Layout.BALANCED),
        help="positions of a ring rank: a chunk from either end of a sequence, so that causal attention costs all alike, or one",
    )
    add(
        "--zero",
        type=int,
        choices=[stage.value for stage in Zero],
        default=0,
        help="what is sharded over replicas (dp × cp): 1 the optimizer's state, 2 gradients too, 3 parameters too",
    )
    add(
        "--bucket-mb",
        type=float,
        metavar="MB",
        help=f"MiB of gradients that are averaged by one call (--zero 0 and 1); left out: {DEFAULT_BUCKET_MB:g}",
    )
    add(
        "--grad-reduce",
        choices=[reduce.value for reduce in Reduce],
        help="when averages of gradients begin (--zero 0 and 1): during a stage's last backward; rank r of the pipeline r "
        "backwards later (Megatron-LM's align_grad_reduce); after a rank's last op; left out: overlap",
    )
    add(
        "--overlap-param-gather",
        action="store_true",
        help="with --zero 1: gather updated parameters while the next forwards run, each awaited by the layer that reads it",
    )


def _add_schedule(add: Add) -> None:
    add("--schedule", default="1f1b", help="name of a schedule (pptrace schedule list), or a .csv of torch's actions")
    add("--chunks", type=int, help="stages per rank; left out: the schedule's default")
    add(
        "--group-size",
        type=int,
        help="microbatch group size per virtual stage (interleaved); left out: the pipeline's size",
    )
    add("--lean", action="store_true", help="fewer warmup forwards (interleaved)")
    add("--memory-limit", type=int, help="activations that a rank may hold (zb-auto); left out: all microbatches")
    add("--microbatches", type=int, help=f"per step and pipeline; left out: the CSV's, or {DEFAULT_MICROBATCHES}")
    add("--microbatch-size", type=int, default=2, help="sequences per microbatch")
    add("--global-batch-size", type=int, help="sequences per step of all replicas, in place of --microbatches")
    add(
        "--like",
        choices=[MEGATRON],
        help="send and receive as this framework does: presets of --p2p-calls, --p2p-mode, --p2p-sync and --prefetch, of which "
        "those that are given override it",
    )
    add(
        "--p2p-calls",
        choices=[calls.value for calls in Calls],
        help="which sends and receives are posted together, and awaited when: those between two ops of the plan; Megatron-LM's "
        "of 1f1b and interleaved-1f1b; these with its overlap_p2p_comm, and overlap_p2p_comm_warmup_flush too; left out: plan",
    )
    add("--p2p-mode", choices=[mode.value for mode in Mode], help="how messages are posted; left out: batched")
    add(
        "--p2p-sync",
        action=argparse.BooleanOptionalAction,
        help="the host waits for the GPU after each call that is awaited, as with Megatron-LM's batch_p2p_sync; left out: no",
    )
    add(
        "--prefetch",
        type=int,
        metavar="N",
        help="compute actions that a receive is posted ahead, 0: with its wait; left out: "
        f"{DEFAULT_PREFETCH}, or 0 with --p2p-mode blocking, --negotiate or Megatron-LM's --p2p-calls",
    )
    add("--negotiate", action="store_true", help="send the shape before every message")
    add(
        "--scatter-gather-tensors",
        action="store_true",
        help="each rank of tp sends a part of an activation, and the receivers gather it over tp",
    )
    add("--pipeline-dtype", choices=DTYPES, help="of messages between stages; left out: --dtype")
    add(
        "--variable-seq-lengths",
        type=int,
        metavar="SHORTEST",
        help="sequences of each microbatch have SHORTEST to --seq tokens, drawn anew in every step; needs --negotiate",
    )
    add(
        "--packed",
        type=int,
        metavar="SHORTEST",
        help="sequences are packed of documents of SHORTEST to --seq tokens, drawn anew in every step, which see only themselves",
    )
    add("--backend", choices=BACKENDS, default="auto", help="auto: by the number of GPUs")


def _add_model(add: Add) -> None:
    add("--seq", type=int, default=64, help="bytes per sequence")
    add("--layers", type=int, default=8, help="transformer layers")
    add(
        "--encoder-layers",
        type=int,
        default=0,
        metavar="N",
        help="the first N layers are an encoder's, the others its decoder's, which attend over what that makes (T5); stages of "
        "the decoder then pass on two tensors",
    )
    add("--encoder-seq", type=int, metavar="S", help="bytes before a sequence that the encoder reads; left out: --seq")
    add("--hidden", type=int, default=96, help="hidden size")
    add("--heads", type=int, default=4, help="attention heads")
    add("--kv-heads", type=int, metavar="N", help="key and value heads (GQA); left out: as many as heads")
    add(
        "--vocabulary",
        type=int,
        default=NUM_BYTES,
        metavar="N",
        help="token ids of embedding and head; the data are bytes, so that those beyond 256 occur in no text",
    )
    add(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        metavar="N",
        help="rows of embedding and head are a multiple of N times tp, as in Megatron-LM; the loss leaves out the others",
    )
    add("--tied", action="store_true", help="one weight for embedding and head")
    add("--dropout", type=float, default=0.0, help="probability, after the embedding and in each layer")
    add(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of parameters; bfloat16 has float32 gradients and main parameters",
    )
    add(
        "--recompute",
        "--recompute-granularity",
        choices=[what.value for what in Recompute],
        default="none",
        help="what backward recomputes",
    )
    add(
        "--recompute-method",
        choices=[method.value for method in RecomputeMethod],
        help="of --recompute full: all layers, each N as one (uniform, the default), or the first N of a stage (block)",
    )
    add("--recompute-num-layers", type=int, metavar="N", help="the N of --recompute-method; left out: 1")
    add(
        "--recompute-modules",
        metavar="NAME,NAME",
        help=f"of --recompute selective: {', '.join(RecomputeModule)}; left out: {RecomputeModule.CORE_ATTN}",
    )
    add(
        "--recompute-microbatches-beyond",
        type=int,
        metavar="K",
        help="of the microbatches outstanding on a rank, K recompute by --recompute and all others fully",
    )
    add("--offload-activations", action="store_true", help="activations wait for their backward in the host's memory")
    add(
        "--cuda-graphs",
        action="store_true",
        help="capture the forward and backward of each stage, and replay them for every microbatch",
    )
    add("--seed", type=int, default=0, help="of parameters and data")


class _Read(argparse.Action):
    """An option with several names whose value is read under the one that was given, so that its refusal has that."""

    def __init__(self, *args: Any, read: Callable[[str, str], object], **others: Any) -> None:
        """Take what reads a text, and the name of the option in its refusals."""
        super().__init__(*args, **others)
        self._read = read

    def __call__(
        self, _parser: argparse.ArgumentParser, options: argparse.Namespace, text: Any, name: str | None = None
    ) -> None:
        setattr(options, self.dest, self._read(text, name or self.option_strings[0]))


def _read_count(text: str, option: str) -> int:
    """Read a number of layers.

    Raises:
        UsageError: it is none; ``option`` is what the line blames.
    """
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{option} is {text}; expected a number of layers, at least 0")
    return int(text)


def _add_partition(add: Add) -> None:
    add(
        *("--split", "--layout", "--pipeline-model-parallel-layout"),
        action=_Read,
        read=read_split,
        metavar="SPLIT",
        help="layers of each stage, as numbers (3,4,4,1) or as Megatron-LM's layout (Et*3|(t*4|)*2,tL); the first and the last "
        "stage may have none (0,4,4,0 or E|(t*4|)*2L); left out: even",
    )
    add(
        *("--count-embedding", "--account-for-embedding-in-pipeline-split"),
        action="store_true",
        help="the embedding counts as a layer of the first stage",
    )
    add(
        *("--count-loss", "--account-for-loss-in-pipeline-split"),
        action="store_true",
        help="head and loss count as a layer of the last stage",
    )
    add(
        *("--first-layers", "--decoder-first-pipeline-num-layers"),
        action=_Read,
        read=_read_count,
        metavar="N",
        help="layers of the first rank, in all of its stages together; the others share the rest",
    )
    add(
        *("--last-layers", "--decoder-last-pipeline-num-layers"),
        action=_Read,
        read=_read_count,
        metavar="N",
        help="layers of the last rank, in all of its stages together; the others share the rest",
    )
    add(
        "--balance", action="store_true", help="measure embedding, layer and head, and partition so that ranks are even"
    )
    add("--save-layer-times", metavar="FILE.json", help="write what --balance measured")
    add("--layer-times", metavar="FILE.json", help="balance by times of an earlier run, without measuring")


def _add_training(add: Add) -> None:
    add("--steps", type=int, default=10, help="training steps")
    add("--lr", type=float, default=3e-3, help="learning rate of AdamW")
    add("--clip-grad", type=float, default=0.0, metavar="NORM", help="clip the gradients of all stages to it; 0: off")
    add(
        "--optimizer-sync",
        choices=[sync.value for sync in OptimizerSync],
        default=OptimizerSync.SYNCHRONOUS.value,
        help="how ranks agree on the norm: before they update, or after it, rolling back what was wrong",
    )
    add(
        "--eval-interval",
        type=int,
        metavar="N",
        help="after each N steps evaluate: forwards alone, without dropout, on batches that are not trained on",
    )
    add("--eval-iters", type=int, metavar="N", help="batches of an evaluation (1)")
    add("--peak-tflops", type=float, help="of one rank's device, for MFU; left out: a table of GPUs, or a CPU measured")
    add(
        "--memory", action="store_true", help="after the last step, one more step that measures each rank's activations"
    )
    add("--sleep-forward", type=float, default=0.0, metavar="MS", help="sleep in every forward besides computing")
    add("--sleep-backward", type=float, default=0.0, metavar="MS", help="sleep in every backward besides computing")
    add("--sleep-weight", type=float, metavar="MS", help="W's part of --sleep-backward; left out: half")
    add(
        "--sleep-per-layer", action="store_true", help="the times to sleep are those of a layer: a stage sleeps as many"
    )
    add(
        "--sleep-rows",
        type=float,
        default=0.0,
        metavar="MS",
        help="experts sleep for each of their rows, twice in a backward",
    )
    add(
        "--fault",
        type=Fault.read,
        action="append",
        default=[],
        metavar="KIND:KEY=VALUE,…",
        help="a fault, may be given again: slow:ranks=1,times=2, python:stages=1,ms=20, link:ranks=0+1,ms=40, …",
    )
    add(
        "--sleep-head",
        type=float,
        default=0.0,
        metavar="N",
        help="with --sleep-per-layer: head and loss sleep as N layers; what a vocabulary of V costs is V/(12·h + 2·s) layers",
    )


_GROUPS: Mapping[str, Callable[[Add], None]] = {
    "the mesh": _add_mesh,
    "the pipeline": _add_schedule,
    "the model": _add_model,
    "experts": add_experts,
    "the partition of layers": _add_partition,
    "training and output": _add_training,
}


class _Parser(argparse.ArgumentParser):
    """Parser whose errors are one line, without the hundred lines of all options."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="train_gpt.py",
        description="Train a small byte-level GPT on a pipeline of processes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for title, fill in _GROUPS.items():
        fill(parser.add_argument_group(title).add_argument)
    return parser
