"""Megatron-LM's ``parallel_state``: the sizes of the mesh and the order of its axes; and its optimizers and gradients."""

from __future__ import annotations

import inspect
from functools import partial
from types import ModuleType
from typing import Any

from instrument.adapters.hooks import Hooks, Watch, arguments_of, require, require_parameters
from instrument.adapters.watched_pass import watch_optimizer, watch_span
from instrument.session import Session
from pptrace.marks import SpanKind

STATE = "megatron.core.parallel_state"
OPTIMIZERS = "megatron.core.optimizer.optimizer"
GRADIENTS = "megatron.core.distributed.finalize_model_grads"


def mesh_of(state: ModuleType, num_chunks: int) -> dict[str, int | str] | None:
    """The sizes of the mesh; None where ``parallel_state`` was not initialised."""
    functions = {
        "tp": "get_tensor_model_parallel_world_size",
        "cp": "get_context_parallel_world_size",
        "dp": "get_data_parallel_world_size",
        "pp": "get_pipeline_model_parallel_world_size",
        "ep": "get_expert_model_parallel_world_size",
    }
    try:
        sizes: dict[str, int | str] = {axis: int(getattr(state, name)()) for axis, name in functions.items()}
    except (AssertionError, AttributeError, TypeError):
        return None
    order = "-".join(axis for axis in str(getattr(state, _ORDER, "tp-cp-ep-dp-pp")).split("-") if axis != "ep")
    return sizes | {"vpp": num_chunks, "order": order}


_ORDER = "_pptrace_order"


def watch_order(state: ModuleType, hooks: Hooks) -> None:
    """Keep in which order ``initialize_model_parallel`` lays the axes over the ranks.

    Raises:
        AttributeError: this is another Megatron-LM than those that are known.
    """
    require_parameters(state, "initialize_model_parallel", ("order",))
    signature = inspect.signature(state.initialize_model_parallel)

    def watch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        order = str(arguments_of(signature, args, kwargs)["order"])
        yield
        setattr(state, _ORDER, order)

    hooks.wrap(state, "initialize_model_parallel", watch)


def watch_optimizers(optimizers: ModuleType, hooks: Hooks, listener: Session) -> None:
    """One step of a ``MegatronOptimizer`` is one step, however many of torch's optimizers it holds.

    Raises:
        AttributeError: this is another Megatron-LM than those that are known.
    """
    require(optimizers, ("MegatronOptimizer",))
    for kind in list(vars(optimizers).values()):
        if isinstance(kind, type) and issubclass(kind, optimizers.MegatronOptimizer):
            step = vars(kind).get("step")
            if step is not None and not getattr(step, "__isabstractmethod__", False):
                hooks.wrap(kind, "step", partial(watch_optimizer, listener))


def watch_gradients(gradients: ModuleType, hooks: Hooks, listener: Session) -> None:
    """``finalize_model_grads`` is the synchronisation of gradients.

    Raises:
        AttributeError: this is another Megatron-LM than those that are known.
    """
    hooks.wrap(gradients, "finalize_model_grads", partial(watch_span, listener, SpanKind.GRAD_SYNC))
