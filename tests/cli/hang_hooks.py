"""Hooks of the few functions of torch.distributed that the scripts of these tests call, for the call log alone.

A script imports it as its first line, under ``pptrace run``.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist

from instrument.adapters.calls import Call, CallGroup
from instrument.launch.call_log import CallLog, call_log_path

LOG = CallLog(call_log_path(Path(os.environ["PPTRACE_CONTROL_DIR"]), int(os.environ["LOCAL_RANK"])))
GROUPS: dict[Any, CallGroup] = {}
COUNTS: Counter[Any] = Counter()
NAMES = {"all_gather_into_tensor": "all_gather", "isend": "send", "irecv": "recv"}


def _group(group: Any) -> CallGroup:
    key = group or dist.group.WORLD
    if key not in GROUPS:
        GROUPS[key] = CallGroup(
            key.group_name, tuple(dist.get_process_group_ranks(key)), dist.get_backend(key), key.group_desc
        )
    return GROUPS[key]


def _tensor_bytes(arguments: Any) -> int:
    tensors = [each for each in arguments if hasattr(each, "numel")]
    lists = [sum(part.numel() * part.element_size() for part in each) for each in arguments if isinstance(each, list)]
    return max([tensor.numel() * tensor.element_size() for tensor in tensors] + lists, default=0)


class Watched:
    """A Work whose end is seen."""

    def __init__(self, work: Any, call: Call) -> None:
        self._work, self._call = work, call

    def wait(self) -> Any:
        LOG.waiting(self._call)
        try:
            done = self._work.wait()
        except BaseException:
            LOG.failed(self._call)
            raise
        LOG.completed(self._call)
        return done


def _hook(name: str, peer_at: int | None = None) -> None:
    original = getattr(dist, name)

    def hooked(*args: Any, group: Any = None, async_op: bool = False, tag: int = 0, **kwargs: Any) -> Any:
        kind = NAMES.get(name, name)
        is_message = kind in ("send", "recv")
        peer = -1 if peer_at is None else (args[peer_at] if len(args) > peer_at else kwargs.get("src", -1))
        peer = -1 if peer is None else peer
        own = _group(group)
        key = (own.name, kind if is_message else "", peer if is_message else -1, tag)
        is_async = async_op or name in ("isend", "irecv")
        number = COUNTS["all"]
        call = Call(number, kind, own, peer, _tensor_bytes(args), COUNTS[key], is_async=is_async, tag=tag)
        COUNTS["all"] += 1
        COUNTS[key] += 1
        LOG.posted(call)
        more = {"tag": tag} if is_message else {} if not async_op else {"async_op": True}
        try:
            result = original(*args, group=group, **more, **kwargs)
        except BaseException:
            LOG.failed(call)
            raise
        LOG.returned(call)
        return Watched(result, call) if is_async else result

    setattr(dist, name, hooked)


for each in ("all_reduce", "all_gather", "all_gather_into_tensor", "barrier"):
    _hook(each)
for each in ("broadcast", "send", "recv", "isend", "irecv"):
    _hook(each, 1)
