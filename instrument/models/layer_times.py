"""Times of a GPT's layers on one rank: measured on its device, or read from the file of an earlier run.

With tp and cp a rank has a share of each layer and waits for the ranks that share it; the times include that.

The file is JSON: ``{"model": {…}, "embedding_ns": 1, "layers_ns": [1, …], "head_ns": 1}``, where "model" says for which
sizes, of the model and of a rank's share, the times hold.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from instrument.mesh import Mesh
from instrument.models.gpt import Block, Embedding, Head, cross_entropy
from instrument.models.gpt_config import GptConfig
from instrument.models.parallel import Parallel, alone
from instrument.models.rank_form import RankForm
from instrument.pipeline.balance import LayerTimes
from pptrace.errors import UsageError
from pptrace.marks import Axis, Collective

_NUM_RUNS = 7
_NUM_WARMUPS = 3


def measure_layer_times(
    config: GptConfig, microbatch_size: int, device: torch.device, parallel: Parallel | None = None
) -> LayerTimes:
    """Measure forward and backward of one microbatch through each part alone: medians of several runs, in ns.

    All layers have equal sizes, so one is measured for all. The ranks that share layers by ``parallel`` call this
    together; None: the rank has whole layers.
    """
    parallel = parallel or alone()
    held, between = config.sequence // parallel.context.size, parallel.activation_length(config.sequence)
    tokens = torch.randint(config.vocabulary, (microbatch_size, held), device=device)
    hidden = torch.randn(microbatch_size, between, config.hidden, dtype=config.dtype, device=device)
    hidden.requires_grad_()
    embedding, block, head = (part(config, parallel).to(device) for part in (Embedding, Block, Head))
    embedding_ns = _median_ns(lambda: embedding(tokens).sum(), device)
    layer_ns = _median_ns(lambda: block(hidden).sum(), device)
    group, vocabulary = parallel.region.group, config.vocabulary
    head_ns = _median_ns(lambda: cross_entropy(head(hidden), tokens, group, vocabulary), device)
    return LayerTimes(embedding_ns, (layer_ns,) * config.layers, head_ns)


def share_layer_times(
    config: GptConfig, microbatch_size: int, device: torch.device, mesh: Mesh, parallel: Parallel
) -> LayerTimes:
    """Measure on the ranks that share layers with global rank 0, and broadcast, so that all choose the same partition.

    Every rank of the world calls this.
    """
    times = torch.zeros(3, dtype=torch.int64)
    if mesh.pp_rank == mesh.dp_rank == 0:
        measured = measure_layer_times(config, microbatch_size, device, parallel)
        times = torch.tensor([measured.embedding_ns, measured.layers_ns[0], measured.head_ns])
    times = times.to(device if dist.get_backend() == "nccl" else "cpu")
    recorder = parallel.region.group.recorder
    with recorder.collective(Collective.BROADCAST, Axis.WORLD, dist.get_world_size(), times.nbytes, step=0):
        dist.broadcast(times, src=0)
    embedding_ns, layer_ns, head_ns = times.tolist()
    return LayerTimes(embedding_ns, (layer_ns,) * config.layers, head_ns)


def write_layer_times(path: Path, times: LayerTimes, form: RankForm, overlap: bool = False) -> None:
    """Write times for later runs; they hold for ranks of this ``form`` with ``overlap`` on or off.

    Raises:
        UsageError: the file cannot be written.
    """
    written = {
        "model": _sizes(form, overlap),
        "embedding_ns": times.embedding_ns,
        "layers_ns": times.layers_ns,
        "head_ns": times.head_ns,
    }
    try:
        path.write_text(json.dumps(written, indent=2) + "\n")
    except OSError as err:
        raise UsageError(f"{path}: cannot be written: {err.strerror}") from None


def read_layer_times(path: Path, form: RankForm, overlap: bool = False) -> LayerTimes:
    """Read the times in a file.

    Raises:
        UsageError: the file cannot be read, is none of layer times, or is of another model or share of it.
    """
    try:
        contents = json.loads(path.read_text())
    except OSError as err:
        raise UsageError(f"{path}: {err.strerror}; --balance --save-layer-times writes such a file") from None
    except ValueError as err:
        raise UsageError(f"{path}: is no JSON ({err}); --balance --save-layer-times writes such a file") from None
    if not isinstance(contents, dict):
        raise UsageError(f"{path}: holds no JSON object; expected layer times as --save-layer-times writes them")
    expected = _sizes(form, overlap)
    model = contents.get("model")
    if model != expected:
        raise UsageError(f"{path}: has times of another model: {_differences(model, expected)}; measure anew")
    return LayerTimes(
        _time(path, contents, "embedding_ns"), _layers(path, contents, form.config), _time(path, contents, "head_ns")
    )


def _median_ns(forward: Callable[[], Tensor], device: torch.device) -> int:
    runs = [_timed_ns(forward, device) for _ in range(_NUM_WARMUPS + _NUM_RUNS)]
    return round(statistics.median(runs[_NUM_WARMUPS:]))


def _timed_ns(forward: Callable[[], Tensor], device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter_ns()
    torch.autograd.backward(forward())
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns() - started


def _sizes(form: RankForm, overlap: bool) -> dict[str, object]:
    config = form.config
    return {
        "layers": config.layers,
        "hidden": config.hidden,
        "heads": config.heads,
        "kv_heads": config.num_kv_heads,
        "sequence": config.sequence,
        "vocabulary": config.padded_vocabulary(form.tp),
        "microbatch_size": form.microbatch_size,
        "dtype": str(config.dtype).removeprefix("torch."),
        "dropout": config.dropout,
        "recompute": config.recompute.value,
        "tp": form.tp,
        "cp": form.context.size,
        "ulysses": form.context.ulysses,
        "cp_comm_type": str(form.context.exchange),
        "cp_layout": str(form.context.layout),
        "sequence_parallel": form.sequence,
        "overlap": overlap,
    }


def _differences(contents: object, expected: dict[str, object]) -> str:
    """The sizes in which a file and this run differ, as text."""
    if not isinstance(contents, dict):
        return f"model is {contents!r}"
    differing = [name for name in expected | contents if contents.get(name) != expected.get(name)]
    return ", ".join(f"{name} is {contents.get(name)} where this run has {expected.get(name)}" for name in differing)


def _time(path: Path, contents: dict[str, Any], name: str) -> int:
    value = contents.get(name)
    if not isinstance(value, int) or value < 0:
        raise UsageError(f"{path}: {name} is {value!r}; expected a whole number of ns")
    return value


def _layers(path: Path, contents: dict[str, Any], config: GptConfig) -> tuple[int, ...]:
    values = contents.get("layers_ns")
    if not isinstance(values, list) or len(values) != config.layers:
        raise UsageError(f"{path}: layers_ns is {values!r}; expected a list of {config.layers} times in ns")
    return tuple(_time(path, {"layers_ns": value}, "layers_ns") for value in values)
