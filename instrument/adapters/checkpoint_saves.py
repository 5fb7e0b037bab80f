"""Hooks of what writes checkpoints, so that its time has a name: ``torch.save`` into a file, ``torch.distributed.checkpoint``, as
torchtitan saves, and Megatron-LM's ``save_checkpoint``.
"""

from __future__ import annotations

import os
from functools import partial
from types import ModuleType
from typing import Any

from instrument.adapters.hooks import Hooks, Watch
from instrument.session import Session

FUNCTIONS = {
    "torch.serialization": ("save",),
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save"),
    "megatron.training.checkpointing": ("save_checkpoint",),
}
"""Functions that save, by module."""
_RANGE = "pptrace.mark: save checkpoint"


def watch_saves(module: ModuleType, hooks: Hooks, listener: Session) -> None:
    """Hook the functions of a module that save.

    Raises:
        AttributeError: it lacks one.
    """
    for name in FUNCTIONS[module.__name__]:
        original = getattr(module, name)
        of_torch = module.__name__ == "torch.serialization"
        watched = hooks.wrap(module, name, partial(_watch_file if of_torch else _watch, listener))
        hooks.replace_everywhere(name, original, watched)


def _watch_file(listener: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
    """Other tensors than those of checkpoints are written into memory."""
    if isinstance(args[1] if len(args) > 1 else kwargs.get("f"), str | os.PathLike):
        yield from _watch(listener, args, kwargs)


def _watch(listener: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
    with listener.recorder.named(_RANGE):
        yield
