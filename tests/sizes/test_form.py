"""Tensors that a layer of Llama's form saves for its backward, against one that torch runs."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from pptrace.sizes.activations import ActivationSizes
from pptrace.sizes.form import Family, ModelForm
from tests.support.gpt_runs import facts

SEQUENCES, TOKENS, HIDDEN, HEADS, WIDTH = 2, 64, 32, 4, 88


class Norm(torch.autograd.Function):
    """RMSNorm as a fused kernel has it: it saves its input and a statistic of each token."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        rstd = x.pow(2).mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(x, rstd)
        return x * rstd


class Layer(nn.Module):
    """Written without a look at the formulas: attention of whole heads, rotary positions, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(HIDDEN, WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.register_buffer("angle", torch.rand(TOKENS, HIDDEN // HEADS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = Norm.apply(x)
        q, k, v = (each(seen).view(SEQUENCES, TOKENS, HEADS, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        q, k = (each * self.angle.cos() + each.roll(1, -1) * self.angle.sin() for each in (q, k))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(SEQUENCES, TOKENS, HIDDEN))
        inner = Norm.apply(x)
        return x + self.down(functional.silu(self.gate(inner)) * self.up(inner))


def test_a_layer_saves_what_the_formulas_list() -> None:
    layer, kept = Layer(), {}
    constants = {each.data_ptr() for each in (*layer.parameters(), *layer.buffers())}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.data_ptr() not in constants and tensor.shape != layer.angle.shape:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.rand(SEQUENCES, TOKENS, HIDDEN, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made = layer(x)
    assert made.requires_grad
    sizes = facts(
        hidden=HIDDEN,
        heads=HEADS,
        kv_heads=HEADS,
        sequence=TOKENS,
        microbatch_size=SEQUENCES,
        form=ModelForm(Family.LLAMA, WIDTH),
    )
    tensors = ActivationSizes(sizes, 1, 1, False).layer_tensors("none")
    assert sum(kept.values()) == sum(tensors.values()), sorted(kept.values())
