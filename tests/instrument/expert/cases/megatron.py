"""megatron-core's own MoELayer beside ours, on the ranks of a pool of its own: what makes it run on CPUs stays in its processes.

megatron-core computes scores in 32 bits and moves counts to a GPU; the patches below leave float64 as it is and stay on the CPU.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from instrument.collectives import AxisGroup
from instrument.expert.groups import ExpertGroups
from instrument.expert.layer import ExpertLayer
from instrument.recorder import Recorder
from instrument.tensor.region import Region
from pptrace.marks import Axis
from pptrace.sizes.expert_options import Dispatcher, DropOrder, ExpertOptions, Scoring

HIDDEN, WIDTH, SEQUENCE, BATCH, EXPERTS = 8, 12, 6, 2, 4


@dataclass(frozen=True, slots=True)
class Case:
    ep: int
    tp: int = 1
    top_k: int = 2
    pre_softmax: bool = False
    aux: float = 0.0
    z: float = 0.0
    etp: int = 1
    groups: int = 1
    padded: bool = False
    gathered: bool = False
    sigmoid: bool = False
    scale: float = 1.0
    factor: float | None = (
        None  # routes of all sequences of a rank there, of each sequence here: of one alone they are equal
    )
    shared: int = 0

    @property
    def batch(self) -> int:
        return BATCH if self.factor is None else 1


class _Stream:
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self


def _on_cpus() -> Any:
    """Import megatron-core's layer, and let it run without a GPU and in float64; the modules it needs."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.transformer.moe import moe_layer, moe_utils, token_dispatcher
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.Stream = cuda.current_stream = lambda *_, **__: _Stream()
    cuda.stream = lambda _: contextlib.nullcontext()
    moe_utils.te_general_gemm = None
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, **_: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
    if not hasattr(torch, "_softmax_of_any_width"):
        softmax = torch.softmax
        torch._softmax_of_any_width = softmax
        torch.softmax = lambda x, dim=None, dtype=None: softmax(
            x, dim=dim, dtype=None if x.dtype == torch.float64 else dtype
        )
        single = Tensor.float
        Tensor.float = lambda x: x if x.dtype == torch.float64 else single(x)
    return moe_layer


def _theirs(case: Case, moe_layer: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp, expert_model_parallel_size=case.ep, expert_tensor_parallel_size=case.etp
    )
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=EXPERTS, moe_router_topk=case.top_k,
        moe_router_load_balancing_type="seq_aux_loss" if case.aux else "none", moe_aux_loss_coeff=case.aux,
        moe_z_loss_coeff=case.z or None, moe_router_pre_softmax=case.pre_softmax,
        moe_token_dispatcher_type="allgather" if case.gathered else "alltoall",
        ffn_hidden_size=WIDTH, add_bias_linear=False, params_dtype=torch.float64, expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp, tensor_model_parallel_size=case.tp, sequence_parallel=case.tp > 1,
        use_cpu_initialization=True, moe_router_dtype="fp64", gated_linear_unit=False, bias_activation_fusion=False,
        perform_initialization=False, moe_router_num_groups=case.groups if case.groups > 1 else None,
        moe_router_group_topk=1 if case.groups > 1 else None, moe_expert_capacity_factor=case.factor,
        moe_router_score_function="sigmoid" if case.sigmoid else "softmax", moe_router_topk_scaling_factor=case.scale,
        moe_shared_expert_intermediate_size=case.shared or None,
    )  # fmt: skip
    spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
    return moe_layer.MoELayer(config, spec.submodules, layer_number=1)


def _ours(case: Case) -> ExpertLayer:
    scoring = Scoring.SOFTMAX_BEFORE if case.pre_softmax else Scoring.SOFTMAX_AFTER
    scoring = Scoring.SIGMOID if case.sigmoid else scoring
    dispatcher = Dispatcher.PADDED if case.padded else Dispatcher.ALL_TO_ALL
    dispatcher = Dispatcher.ALL_GATHER if case.gathered else dispatcher
    options = ExpertOptions(
        EXPERTS, case.top_k, width=WIDTH, scoring=scoring, aux_loss=case.aux, z_loss=case.z, num_groups=case.groups,
        dispatcher=dispatcher, scale=case.scale, capacity_factor=case.factor, drop_order=DropOrder.WEIGHTS,
        shared_width=case.shared,
    )  # fmt: skip
    recorder = Recorder()
    tensor, experts, within = (
        AxisGroup(dist.group.WORLD if size > 1 else None, axis, recorder)
        for size, axis in ((case.tp, Axis.TP), (case.ep, Axis.EP), (case.etp, Axis.ETP))
    )
    groups = ExpertGroups(experts, AxisGroup(None, Axis.CP, recorder), etp=within)
    return ExpertLayer(HIDDEN, options, Region(tensor, sequence=True), groups, bias=False, dtype=torch.float64)


def _share(case: Case, ours: ExpertLayer, theirs: Any, inner: Tensor, outer: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Give both shared MLPs the same matrices (this rank's part of ``inner`` and ``outer``); the pairs of parameters."""
    length = case.shared // case.tp
    first = dist.get_rank() % case.tp * length
    part = slice(first, first + length)
    mlp = theirs.shared_experts
    pairs = [
        (ours.shared.inner.weight, mlp.linear_fc1.weight, inner[part]),
        (ours.shared.outer.weight, mlp.linear_fc2.weight, outer[:, part]),
    ]
    for parameter, other, values in pairs:
        parameter.copy_(values)
        other.copy_(values)
    return [(parameter, other) for parameter, other, _ in pairs]


def compare(cases: list[Case]) -> list[tuple[float, ...]]:
    """Largest errors of each case: output, gradients of the input, the gate, and the matrices of experts and a shared MLP."""
    moe_layer = _on_cpus()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [_compare(case, moe_layer) for case in cases]


def _compare(case: Case, moe_layer: Any) -> tuple[float, ...]:
    theirs, ours = _theirs(case, moe_layer), _ours(case)
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    gate, inner, outer = draw(EXPERTS, HIDDEN), draw(EXPERTS, WIDTH, HIDDEN), draw(EXPERTS, HIDDEN, WIDTH)
    rank = dist.get_rank()
    x, upstream = (draw(dist.get_world_size(), case.batch, SEQUENCE // case.tp, HIDDEN)[rank] for _ in range(2))
    held = ours.inner.experts
    part = ours.inner.held.part(WIDTH)
    with torch.no_grad():
        theirs.router.weight.copy_(gate)
        ours.router.weight.copy_(gate)
        ours.inner.weight.copy_(inner[held.start : held.stop, part])
        ours.outer.weight.copy_(outer[held.start : held.stop, :, part])
        for index, expert in zip(held, theirs.experts.local_experts, strict=True):
            expert.linear_fc1.weight.copy_(inner[index, part])
            expert.linear_fc2.weight.copy_(outer[index][:, part])
        both = _share(case, ours, theirs, draw(case.shared, HIDDEN), draw(HIDDEN, case.shared)) if case.shared else []
    x = x.requires_grad_()
    output = ours(x)
    output.backward(upstream)
    # (microbatch, sequence, hidden) here, (sequence, microbatch, hidden) there
    y = x.detach().transpose(0, 1).contiguous().requires_grad_()
    expected, _ = theirs(y)
    expected.backward(upstream.transpose(0, 1).contiguous())
    pairs = [
        (output.detach(), expected.detach().transpose(0, 1)),
        (x.grad, y.grad.transpose(0, 1)),
        (ours.router.weight.grad, theirs.router.weight.grad),
    ]
    for layer, name in ((ours.inner, "linear_fc1"), (ours.outer, "linear_fc2")):
        gradients = [getattr(expert, name).weight.grad for expert in theirs.experts.local_experts]
        whole = [torch.zeros_like(layer.weight[0]) if gradient is None else gradient for gradient in gradients]
        pairs.append((layer.weight.grad, torch.stack(whole)))
    pairs += [(parameter.grad, other.grad) for parameter, other in both]
    return tuple(float((ours_ - theirs_).abs().max()) for ours_, theirs_ in pairs)
