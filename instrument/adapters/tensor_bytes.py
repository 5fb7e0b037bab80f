"""Bytes of what a call communicates."""

from __future__ import annotations

from typing import Any

import torch


def num_bytes(value: Any) -> int:
    """The bytes of a tensor, or of all tensors of a list or of lists."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(num_bytes, value)) if isinstance(value, list | tuple) else 0
