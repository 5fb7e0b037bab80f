"""megatron-core's own schedules on CPUs over gloo: a small network per stage. For ``pptrace run``; arguments are key=value.

What megatron-core asks of ``torch.cuda`` is answered for the CPU here, in the script. ``truth`` is a folder that takes, by
rank, every op as the network sees it and every message by the tensor that it carries.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

options = {"v": 1, "m": 4, "steps": 3, "overlap": 0, "ddp": 0, "eval": 0, "truth": ""}
options |= {key: type(options[key])(value) for key, value in (item.split("=") for item in sys.argv[1:])}
V, M = int(options["v"]), int(options["m"])


def on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda *_: None
torch.Tensor.cuda = lambda self, *_, **__: self
torch.zeros, torch.empty, torch.tensor = on_cpu(torch.zeros), on_cpu(torch.empty), on_cpu(torch.tensor)

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func, p2p_communication  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

dist.init_process_group("gloo")
rank, P = dist.get_rank(), 2
virtual = {"virtual_pipeline_model_parallel_size": V if V > 1 else None}
parallel_state.initialize_model_parallel(pipeline_model_parallel_size=P, **virtual)
pp_rank = parallel_state.get_pipeline_model_parallel_rank()
config = TransformerConfig(
    num_layers=P * V,
    hidden_size=16,
    num_attention_heads=2,
    pipeline_model_parallel_size=P,
    pipeline_dtype=torch.float32,
    batch_p2p_comm=False,
    overlap_p2p_comm=bool(options["overlap"]),
    deallocate_pipeline_outputs=not options["overlap"],  # on CPUs it frees what an asynchronous send still reads
    use_cpu_initialization=True,
    **virtual,
    **({"microbatch_group_size_per_vp_stage": P} if V > 1 else {}),
)
Seen = list[Any]
seen: list[Seen] = []
"""Of what this rank did, in its order: [kind, stage, microbatch], of a message first [kind, its tensor]."""
inputs: list[tuple[torch.Tensor, Seen]] = []
outputs: list[tuple[torch.Tensor, Seen]] = []
gradients: list[tuple[torch.Tensor, Seen]] = []


class Stage(MegatronModule):
    def __init__(self, chunk: int) -> None:
        super().__init__(config)
        self.stage, self.vp_stage = chunk * P + pp_rank, chunk if V > 1 else None
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process, self.post_process = self.stage == 0, self.stage == P * V - 1
        self.share_embeddings_and_output_weights = False
        torch.manual_seed(self.stage)
        self.net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.given: torch.Tensor | None = None
        self.count = 0

    def set_input_tensor(self, given: Any) -> None:
        self.given = given[0] if isinstance(given, list) else given

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known = [self.stage, self.count]
        self.count += 1
        seen.append(["F", *known])
        if self.given is not None:
            x = self.given
            inputs.append((x, known))
        out = x + self.net(x)
        outputs.append((out, known))
        if out.requires_grad:
            out.register_hook(lambda grad: (seen.append(["B", *known]), gradients.append((grad, known)))[-1])
        return out


def data(seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(8, 2, 16, generator=generator)


def forward_step(batches: Iterator[torch.Tensor], model: nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
    x, y = next(batches), next(batches)

    def loss_func(out: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        loss = ((out - y) ** 2).mean()
        return loss, {"loss": loss.item()}

    return model(x), loss_func


def watched(post: Callable[..., Any]) -> Callable[..., Any]:
    ends = {"send_prev": "SEND_B", "recv_prev": "RECV_F", "send_next": "SEND_F", "recv_next": "RECV_B"}

    def posted(**kwargs: Any) -> Any:
        seen.extend(
            [kind, kwargs[f"tensor_{end}"]] for end, kind in ends.items() if kwargs[f"tensor_{end}"] is not None
        )
        return post(**kwargs)

    return posted


def resolve(item: Seen) -> Seen:
    """A message by its tensor: an output, an input, the gradient that a backward got, or the one an input has got."""
    if len(item) == 3:
        return item
    kind, tensor = item
    indices = {"SEND_F": outputs, "RECV_F": inputs, "RECV_B": gradients}.get(kind)
    if indices is None:
        return [kind, *next(known for given, known in inputs if given.grad is tensor)]
    same = (lambda t: t.data_ptr() == tensor.data_ptr()) if kind == "RECV_B" else (lambda t: t is tensor)
    return [kind, *next(known for given, known in indices if same(given))]


stages = [Stage(chunk) for chunk in range(V)]
models: list[Any] = stages
if options["ddp"]:
    models = [DistributedDataParallel(config, DistributedDataParallelConfig(), stage) for stage in stages]
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.01, clip_grad=0.0), models)
else:
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=0.05)
if options["truth"]:
    p2p_communication._p2p_ops = watched(p2p_communication._p2p_ops)
run_pass = get_forward_backward_func()
batches = [data(parallel_state.get_data_parallel_rank()) for _ in range(V)]
steps = []


def run(forward_only: bool) -> Any:
    for stage in stages:
        stage.count = 0
    return run_pass(
        forward_step_func=forward_step,
        data_iterator=batches if V > 1 else batches[0],
        model=models if V > 1 else models[:1],
        num_microbatches=M,
        seq_length=8,
        micro_batch_size=2,
        forward_only=forward_only,
    )


for step in range(int(options["steps"])):
    for model in models:
        if options["ddp"]:
            model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = run(forward_only=False)
    steps.append([resolve(item) for item in seen])
    optimizer.step()
    for seen_here in (seen, inputs, outputs, gradients):
        seen_here.clear()
    if losses:
        print(f"loss of rank {rank}, step {step}: {[loss['loss'] for loss in losses]!r}", flush=True)
    if options["eval"]:
        with torch.no_grad():
            run(forward_only=True)
        for seen_here in (seen, inputs, outputs, gradients):
            seen_here.clear()
if options["truth"]:
    folder = Path(str(options["truth"]))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{rank}.json").write_text(json.dumps(steps))
dist.destroy_process_group()
