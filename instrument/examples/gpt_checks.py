"""Refusals of the GPT example: options that contradict each other, or that would change nothing."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from instrument.context.shard import KeyExchange
from instrument.context.shard import Layout as ContextLayout
from instrument.mesh import MeshShape
from instrument.models.gpt_config import NUM_BYTES, Recompute, RecomputeMethod
from instrument.optim.adamw import WEIGHT_DECAY
from instrument.optim.clipping import OptimizerSync, require_norm
from instrument.optim.main_parameters import Zero
from instrument.pipeline.partition import Layout
from pptrace.errors import UsageError
from pptrace.schedule.plan import Plan

OF_EQUAL_LAYERS = ("balance", "layer_times", "recompute_microbatches_beyond")
"""Options that take all layers for equal."""


_AT_LEAST_ONE = (
    *("layers", "hidden", "heads", "kv_heads", "seq", "encoder_seq", "recompute_num_layers"),
    *("steps", "microbatch_size", "eval_interval", "eval_iters"),
)
"""Options of which none makes a model or a run."""


def leave_out(options: argparse.Namespace, flag: str, why: str, *others: str) -> None:
    """Refuse options that do not go with another one."""
    for name in others:
        if getattr(options, name) not in (None, False, 0):
            raise UsageError(f"{flag} with --{name.replace('_', '-')}, which {why}; leave out one")


def check_numbers(options: argparse.Namespace) -> None:
    """Refuse numbers outside of their ranges."""
    for name in _AT_LEAST_ONE:
        if (count := getattr(options, name)) is not None and count < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {count}; expected at least 1")
    if options.eval_iters is not None and options.eval_interval is None:
        raise UsageError(
            "--eval-iters says how many batches an evaluation has; say when there is one with --eval-interval"
        )
    if options.eval_interval is not None and options.optimizer_sync == OptimizerSync.POST_VALIDATION:
        raise UsageError(
            "--eval-interval: with --optimizer-sync post-validation an update is not certain until the next step; use "
            "--optimizer-sync synchronous"
        )
    if options.vocabulary < NUM_BYTES:
        raise UsageError(f"--vocabulary is {options.vocabulary}; expected at least {NUM_BYTES}, one id for each byte")
    if options.make_vocab_size_divisible_by < 1:
        raise UsageError(
            f"--make-vocab-size-divisible-by is {options.make_vocab_size_divisible_by}; expected at least 1"
        )
    if min(options.sleep_forward, options.sleep_backward, options.sleep_rows) < 0:
        raise UsageError("--sleep-forward, --sleep-backward and --sleep-rows take milliseconds from 0 up")
    if options.sleep_head and not (options.sleep_per_layer and 0 < options.sleep_head < math.inf):
        raise UsageError(
            f"--sleep-head is {options.sleep_head}; expected more than 0 times what a layer sleeps, with --sleep-per-layer"
        )
    if options.sleep_weight is not None and not 0 <= options.sleep_weight <= options.sleep_backward:
        raise UsageError("--sleep-weight is a part of --sleep-backward: it takes milliseconds from 0 up to that")
    if not 0 < options.lr < 1 / WEIGHT_DECAY:
        raise UsageError(f"--lr is {options.lr}; expected more than 0 and less than {1 / WEIGHT_DECAY:g}")


def check_clipping(options: argparse.Namespace) -> None:
    """Refuse a norm that cannot be, and a validation of a norm that is not computed."""
    if options.clip_grad:
        require_norm(options.clip_grad)
    elif options.optimizer_sync == OptimizerSync.POST_VALIDATION:
        raise UsageError("--optimizer-sync post-validation validates the gradient norm; give it one with --clip-grad")


def check_axes(options: argparse.Namespace, pp: int) -> None:
    """Refuse options of an axis that has one rank: they would change nothing."""
    for name in ("sequence_parallel", "overlap", "scatter_gather_tensors"):
        value, name = getattr(options, name), f"--{name.replace('_', '-')}"
        if value and options.tp == 1:
            raise UsageError(
                f"{name} is for the ranks of tp, which is 1; give it 2 or more with --tp, or leave {name} out"
            )
    if options.scatter_gather_tensors and pp == 1:
        raise UsageError(
            "--scatter-gather-tensors is for messages between the ranks of pp, which is 1; give it 2 or more with --pp, or leave "
            "--scatter-gather-tensors out"
        )
    if options.scatter_gather_tensors and (options.sequence_parallel or options.negotiate):
        other = "sequence-parallel" if options.sequence_parallel else "negotiate"
        why = "sends parts already" if options.sequence_parallel else "tells shapes of whole activations"
        raise UsageError(f"--scatter-gather-tensors with --{other}, which {why}; leave out one of them")
    if options.ulysses > 1 and options.cp == 1:
        raise UsageError(
            f"--ulysses is {options.ulysses} and cp is 1; it says how many ranks of cp exchange heads: give --cp a multiple of "
            f"{options.ulysses}"
        )

    ring = options.cp // max(options.ulysses, 1)
    for name, value, usual in (
        ("--cp-comm-type", options.cp_comm_type, KeyExchange.P2P),
        ("--cp-layout", options.cp_layout, ContextLayout.BALANCED),
    ):
        if value != usual and ring <= 1:
            raise UsageError(
                f"{name} {value} is for the ranks of cp that exchange no heads, of which there is {max(ring, 1)}; give --cp a "
                f"larger multiple of --ulysses, or leave {name} out"
            )


def check_encoder(options: argparse.Namespace, shape: MeshShape) -> None:
    """Refuse what an encoder with its decoder does not go with."""
    if shape.cp > 1:
        raise UsageError(
            f"--encoder-layers with --cp {shape.cp}: ranks of cp share one causal sequence, and a decoder attends over another "
            "one; leave one out"
        )
    leave_out(options, "--encoder-layers", "takes all layers for equal", *OF_EQUAL_LAYERS)


def check_balance(options: argparse.Namespace, layout: Layout) -> None:
    """Refuse measured times of layers together with other ways to divide them."""
    if options.experts is not None and (options.balance or options.layer_times is not None):
        raise UsageError(
            "--balance and --layer-times take all layers for equal, and layers with experts are not; use --split"
        )
    if options.balance and options.layer_times is not None:
        raise UsageError("--balance measures what --layer-times reads from a file; give one of the two")
    if (options.balance or options.layer_times is not None) and layout != Layout():
        raise UsageError("--balance and --layer-times partition the layers by time; leave out --split, counts and ends")
    if options.save_layer_times is not None and not options.balance:
        raise UsageError("--save-layer-times writes what --balance measures; give both")
    if options.save_layer_times is not None and not Path(options.save_layer_times).resolve().parent.is_dir():
        raise UsageError(f"--save-layer-times is {options.save_layer_times}, whose folder does not exist; make it")


def check_graphs(options: argparse.Namespace, shape: MeshShape, plan: Plan, device: torch.device) -> None:
    """Refuse what replays of captured stages do not do, or were not made to do."""
    if not options.cuda_graphs:
        return
    if plan.has_pairs or plan.splits_backward:
        raise UsageError(
            f"--cuda-graphs captures a forward and a whole backward, and {plan.name} "
            f"{'has pairs of both' if plan.has_pairs else 'splits backwards'}; use a schedule without, as 1f1b"
        )
    for axis, size in (("tp", shape.tp), ("cp", shape.cp), ("ep", shape.ep)):
        if size > 1:
            raise UsageError(
                f"--cuda-graphs with --{axis} {size}: calls between its ranks would lie in a graph, where no range names them; "
                "leave out one"
            )
    varying = ("dropout", "experts", "variable_seq_lengths", "packed")
    leave_out(options, "--cuda-graphs", "is another for every microbatch, where replays are all alike", *varying)
    at_layers = ("overlap_param_gather", "offload_activations", "sleep_forward", "sleep_backward")
    leave_out(options, "--cuda-graphs", "acts between operators of a stage, where a replay runs no Python", *at_layers)
    leave_out(options, "--cuda-graphs", "watches operators, of which a replay calls none", "memory")
    leave_out(options, "--cuda-graphs", "has stages of two inputs", "encoder_layers")
    if options.recompute != Recompute.NONE or options.recompute_microbatches_beyond is not None:
        raise UsageError(
            "--cuda-graphs with recompute, whose forwards in a backward no range would tell; leave out one"
        )
    if options.zero >= Zero.GRADIENTS:
        raise UsageError(
            f"--cuda-graphs leaves parameters where they are, and with --zero {options.zero} they come and go; use --zero 1"
        )
    if device.type != "cuda":
        raise UsageError("--cuda-graphs needs a GPU, and this run is on CPUs; leave it out")


def check_recompute(options: argparse.Namespace) -> None:
    """Refuse settings of another granularity of recompute, and what its layers do not go with."""
    for name, granularity in (
        ("method", Recompute.FULL),
        ("num_layers", Recompute.FULL),
        ("modules", Recompute.SELECTIVE),
    ):
        if getattr(options, f"recompute_{name}") is not None and options.recompute != granularity:
            flag = f"--recompute-{name.replace('_', '-')}"
            raise UsageError(f"{flag} is for --recompute {granularity}, and that is {options.recompute}; leave it out")
    is_block = options.recompute_method == RecomputeMethod.BLOCK
    if is_block and (
        options.balance or options.layer_times is not None or (options.experts and options.expert_every > 1)
    ):
        raise UsageError(
            "--recompute-method block recomputes some layers alone, and --balance, --layer-times and --expert-every take all for "
            "equal; use uniform, or --split"
        )
    num_unrecomputed = options.recompute_microbatches_beyond
    if num_unrecomputed is None:
        return
    if num_unrecomputed < 0:
        raise UsageError(
            f"--recompute-microbatches-beyond is {num_unrecomputed}; expected 0 or more outstanding microbatches"
        )
    if options.experts is not None and (options.expert_every > 1 or len(options.experts) > 1):
        raise UsageError(
            "--recompute-microbatches-beyond takes all layers for equal; give equally many --experts to each of them, or "
            "leave it out"
        )
    if options.recompute == Recompute.FULL:
        raise UsageError("--recompute full recomputes every microbatch; give none or selective for those within")
