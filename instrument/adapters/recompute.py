"""Hooks of activation checkpointing: the forward that a backward runs again has a range.

``torch.utils.checkpoint`` without reentrant autograd takes contexts, of which one is around the recompute; with it, and in
Megatron-LM's copy of it (``megatron/core/tensor_parallel/random.py``), the backward of ``CheckpointFunction`` calls
``ctx.run_function``. torchtitan, DeepSpeed-like scripts and FSDP's wrappers call these.
"""

from __future__ import annotations

import functools
import inspect
from functools import partial
from types import ModuleType
from typing import Any

import torch

from instrument.adapters.hooks import Hooks, Watch, require, require_parameters
from instrument.recompute import MarkedContexts, RecomputeRange
from instrument.session import Session

TORCH, MEGATRON = "torch.utils.checkpoint", "megatron.core.tensor_parallel.random"
_GENERATOR = "_checkpoint_without_reentrant_generator_impl"  # before torch 2.14 without "_impl"


def _watch_backward(listener: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
    """Put a range around ``ctx.run_function`` while the backward of a checkpoint runs."""
    context, original = args[0], args[0].run_function

    def again(*inputs: Any) -> Any:
        with RecomputeRange(listener.recorder, session=listener):
            return original(*inputs)

    context.run_function = again
    try:
        yield
    finally:
        context.run_function = original


def watch_function(module: ModuleType, hooks: Hooks, listener: Session) -> None:
    """Hook the backward of a module's ``CheckpointFunction``.

    Raises:
        AttributeError: it has none.
    """
    require(module, ("CheckpointFunction",))
    require_parameters(module.CheckpointFunction, "forward", ("ctx", "run_function"))
    hooks.wrap(module.CheckpointFunction, "backward", partial(_watch_backward, listener))


def watch_torch(module: ModuleType, hooks: Hooks, listener: Session) -> None:
    """Hook ``torch.utils.checkpoint``, both ways.

    Raises:
        AttributeError: this is another torch than those that are known.
    """
    watch_function(module, hooks, listener)
    name = _GENERATOR if hasattr(module, _GENERATOR) else _GENERATOR.removesuffix("_impl")
    require_parameters(module, name, ("fn", "preserve_rng_state", "context_fn", "debug"))
    original, default = getattr(module, name), module.noop_context_fn
    signature = inspect.signature(original)

    @functools.wraps(original)
    def marked(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        contexts = call.arguments["context_fn"]
        debugs = getattr(module, "_checkpoint_debug_enabled", None) or call.arguments["debug"]  # takes no contexts
        if not (debugs or isinstance(contexts, MarkedContexts) or not hooks.active or torch.compiler.is_compiling()):
            contexts = MarkedContexts(listener.recorder, None if contexts is default else contexts, listener)
        call.arguments["context_fn"] = contexts
        return original(*call.args, **call.kwargs)

    hooks.replace(module, name, marked)
    hooks.replace_everywhere(name, original, marked)
