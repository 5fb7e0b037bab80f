"""Tensors that layers of several forms save for their backward, against such as torch runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pptrace.api.model_file import model_of
from pptrace.sizes.activations import ActivationSizes
from pptrace.sizes.form import Latent, Norms, QkNorm
from tests.support.gpt_runs import facts

SEQUENCES, TOKENS, HIDDEN, HEADS, WIDTH = 2, 64, 32, 4, 88
WIDE, VALUE, ROTARY, KV_RANK, QUERY_RANK = 12, 6, 4, 10, 14


class Norm(torch.autograd.Function):
    """RMSNorm as a fused kernel has it: it saves its input and a statistic of each token."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        rstd = x.pow(2).mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(x, rstd)
        return x * rstd


class Attend(torch.autograd.Function):
    """Causal attention as a fused kernel has it: it saves q, k, v, its output and a log-sum-exp of each row."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        copies = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(copies, 1).mT
        out = (scores.softmax(-1) @ v.repeat_interleave(copies, 1)).transpose(1, 2).contiguous()
        ctx.save_for_backward(q, k, v, out, scores.logsumexp(-1))
        return out


class Heads(nn.Module):
    """Queries, keys and values as grouped-query attention makes them, with a norm or none."""

    def __init__(self, kv_heads: int, dim: int, norm: QkNorm) -> None:
        super().__init__()
        self.dim, self.norm = dim, norm
        self.q = nn.Linear(HIDDEN, HEADS * dim, bias=False)
        self.k, self.v = (nn.Linear(HIDDEN, kv_heads * dim, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, angle: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.norm is QkNorm.ALL:
            q, k = Norm.apply(q), Norm.apply(k)
        q, k, v = (each.view(SEQUENCES, TOKENS, -1, self.dim).transpose(1, 2) for each in (q, k, v))
        if self.norm is QkNorm.HEAD:
            q, k = Norm.apply(q), Norm.apply(k)
        return turned(q, angle), turned(k, angle), v


class LatentHeads(nn.Module):
    """Queries, keys and values as DeepSeek-V2's paper makes them (arXiv 2405.04434, section 2.1)."""

    def __init__(self, query_rank: int | None) -> None:
        super().__init__()
        self.q_down = None if query_rank is None else nn.Linear(HIDDEN, query_rank, bias=False)
        self.q_up = nn.Linear(query_rank or HIDDEN, HEADS * WIDE, bias=False)
        self.down = nn.Linear(HIDDEN, KV_RANK + ROTARY, bias=False)
        self.up = nn.Linear(KV_RANK, HEADS * (WIDE - ROTARY + VALUE), bias=False)

    def forward(self, x: torch.Tensor, angle: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q = self.q_up(x if self.q_down is None else Norm.apply(self.q_down(x)))
        q = q.view(SEQUENCES, TOKENS, HEADS, WIDE).transpose(1, 2)
        latent, rotary = self.down(x).split((KV_RANK, ROTARY), -1)
        both = self.up(Norm.apply(latent)).view(SEQUENCES, TOKENS, HEADS, -1).transpose(1, 2)
        k, v = both.split((WIDE - ROTARY, VALUE), -1)
        plain, of_position = q.split((WIDE - ROTARY, ROTARY), -1)
        key = turned(rotary[:, None], angle).expand(-1, HEADS, -1, -1)
        return torch.cat((plain, turned(of_position, angle)), -1), torch.cat((k, key), -1), v.contiguous()


def turned(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    return x * angle.cos() + x.roll(1, -1) * angle.sin()


class Layer(nn.Module):
    """Written without a look at the formulas: rotary positions, SwiGLU, norms before or after its parts."""

    def __init__(self, heads: nn.Module, out_width: int, norms: Norms, angles: int) -> None:
        super().__init__()
        self.heads, self.norms = heads, norms
        self.out = nn.Linear(out_width, HIDDEN, bias=False)
        self.gate, self.up = (nn.Linear(HIDDEN, WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.register_buffer("angle", torch.rand(TOKENS, angles))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.normed(x, self.attention)
        return x + self.normed(x, self.mlp)

    def normed(self, x: torch.Tensor, part: Any) -> torch.Tensor:
        made = part(x if self.norms is Norms.AFTER else Norm.apply(x))
        return made if self.norms is Norms.BEFORE else Norm.apply(made)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(Attend.apply(*self.heads(x, self.angle)).flatten(2))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


LATENT = {"head_dim": WIDE, "value_dim": VALUE}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "form"),
    [
        (Heads(HEADS, HIDDEN // HEADS, QkNorm.NONE), HEADS, {}),
        (Heads(2, WIDE, QkNorm.HEAD), 2, {"head_dim": WIDE, "norms": Norms.BOTH, "qk_norm": QkNorm.HEAD}),
        (Heads(2, HIDDEN // HEADS, QkNorm.ALL), 2, {"norms": Norms.AFTER, "qk_norm": QkNorm.ALL}),
        (LatentHeads(QUERY_RANK), HEADS, {**LATENT, "latent": Latent(KV_RANK, ROTARY, QUERY_RANK)}),
        (LatentHeads(None), HEADS, {**LATENT, "latent": Latent(KV_RANK, ROTARY)}),
    ],
    ids=["Llama", "Gemma 3", "OLMo 2", "DeepSeek-V3", "DeepSeek-V2-Lite"],
)
def test_a_layer_saves_what_the_formulas_list(heads: nn.Module, kv_heads: int, form: dict[str, Any]) -> None:
    head_dim = form.get("head_dim", HIDDEN // HEADS)
    out_width = HEADS * form.get("value_dim", head_dim)
    angles = ROTARY if "latent" in form else head_dim
    layer, kept = Layer(heads, out_width, form.get("norms", Norms.BEFORE), angles), {}
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
        kv_heads=kv_heads,
        sequence=TOKENS,
        microbatch_size=SEQUENCES,
        form=replace(model_of("llama").form(1), width=WIDTH, **form),
    )
    tensors = ActivationSizes(sizes, 1, 1, False).layer_tensors("none")
    assert sum(kept.values()) == sum(tensors.values()), sorted(kept.values())
