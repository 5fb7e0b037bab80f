"""One trace of PyTorch's profiler, from its preparation to its file."""

from __future__ import annotations

import gzip
import json
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from instrument.launch.recording.script_profilers import by_pptrace
from pptrace.marks import METADATA_KEY

_TAIL_BYTES = 4096
_HISTORY_ENTRIES = 100_000
_BLOCK_BYTES = 1 << 20
COMPRESSION = 4  # a third of the time of gzip's default, for files a tenth larger


class Profiler(Protocol):
    """Interface of a session to whatever records a rank."""

    path: Path

    @property
    def recording(self) -> bool: ...

    @property
    def settings(self) -> dict[str, object]:
        """Settings of what it records; {} where that is not known."""
        ...

    @property
    def takes_annotations(self) -> bool:
        """Return whether what PyTorch annotates now is recorded here, and not in a profiler of the script's."""
        ...

    def prepare(self) -> None: ...

    def release(self) -> None: ...

    def start(self) -> None: ...

    def stop(self, metadata: dict[str, object], *, blocked: bool = False) -> None: ...

    def discard(self) -> None: ...


class TraceProfiler:
    """Records once and writes ``path`` (gzip JSON), whole or not at all.

    It watches all threads of the process: work happens in several, and such a trace can be stopped by any thread, also
    while the main thread is blocked inside a receive. A torch that cannot do so (before 2.8), or records allocations, which
    Kineto assigns to threads, watches the thread that started it and its backward passes, and is stopped by that thread alone.

    Args:
        memory: records all allocations and releases of tensors.
        shapes: records those of the inputs of operators, which alone name the peers of gloo's messages where there are no hooks.
        operators: asked when recording is prepared: without them it costs a program far less.
    """

    def __init__(
        self, path: Path, *, memory: bool = False, shapes: bool = True, operators: Callable[[], bool] = lambda: True
    ) -> None:
        self.path = path
        self._with_memory = memory
        self._with_shapes = shapes
        self._asks_operators = operators
        self._with_operators = True
        self._watches_all_threads = _CAN_WATCH_ALL_THREADS and not memory
        self._profile: Any = None
        self._recording = False
        self._only_thread: int | None = None

    @property
    def recording(self) -> bool:
        return self._recording

    @property
    def takes_annotations(self) -> bool:
        return self._recording

    def prepare(self) -> None:
        """Pay the costs of a first start (loading Kineto and CUPTI, buffers), so that no profiled step does."""
        if self._profile is not None:
            return
        self._with_operators = self._asks_operators() or not _CAN_CHOOSE_SCOPES
        with by_pptrace(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*Profiler clears events")  # of torch up to 2.11, at every first cycle
            first = self._new_profile()
            first.start()
            first.stop()
            self._profile = self._new_profile()
            self._profile.prepare_trace()

    def _new_profile(self) -> Any:
        return profile(
            activities=_activities(),
            record_shapes=self._with_shapes,
            profile_memory=self._with_memory,
            with_stack=False,
            experimental_config=None if self._with_memory else _all_threads_config(),
        )

    @property
    def settings(self) -> dict[str, object]:
        """Settings of what is recorded, by torch's names of the options."""
        return {
            "profiler": "torch",
            "level": "full" if self._with_operators else "light",
            "activities": [activity.name for activity in _activities()],
            "record_shapes": self._with_operators and self._with_shapes,
            "profile_memory": self._with_memory,
            "with_stack": False,
            "all_threads": self._watches_all_threads,
            "cupti_teardown": tears_down_cupti(),
        }

    def release(self) -> None:
        """Undo the preparation, for a profiler of the script that comes first."""
        if self._profile is not None and not self._recording:
            with by_pptrace():
                self._profile.start_trace()
                self._profile.stop_trace()
            self._profile = None

    def start(self) -> None:
        self.prepare()
        with by_pptrace(), nullcontext() if self._with_operators else _without_operators():
            self._profile.start_trace()
        if self._with_memory:
            record_device_history(on=True)
        self._only_thread = None if self._watches_all_threads else threading.get_ident()
        self._recording = True

    def stop(self, metadata: dict[str, object], *, blocked: bool = False) -> None:
        """Stop and write the file, ``metadata`` in it under pptrace's key.

        Waits for the device, except where the main thread is ``blocked``: what it waits for may never come.
        """
        if self._only_thread not in (None, threading.get_ident()):
            self._recording = False
            which = "that records allocations" if self._with_memory else f"of torch {torch.__version__}"
            raise RuntimeError(
                f"the profiler {which} can be stopped only by the thread that started it, which is blocked"
            )
        if blocked:
            self._profile.profiler.use_device = None  # all that it still decides is whether stopping synchronises
        self._profile.add_metadata_json(METADATA_KEY, json.dumps(metadata))  # Kineto drops what comes after the stop
        self._recording = False
        if tears_down_cupti():
            os.environ[_TEARDOWN] = "1"
        with by_pptrace():
            self._profile.stop_trace()
        if self._with_memory:
            record_device_history(on=False)
        raw = self.path.with_name(f".{self.path.name}.raw")
        packed = self.path.with_name(f".{self.path.name}.tmp")
        try:
            with by_pptrace():
                self._profile.export_chrome_trace(str(raw))
            if not raw.exists():  # Kineto raises nothing
                raise OSError(f"torch's profiler wrote no file into {raw.parent}; is there room left on that disk?")
            _compress(raw, packed)
            packed.replace(self.path)
        finally:
            for part in (raw, raw.with_name(f"{raw.name}.tmp"), packed):  # the second is what Kineto writes first
                part.unlink(missing_ok=True)
            self._profile = None

    def discard(self) -> None:
        """Stop without a file."""
        self._recording = False
        with by_pptrace():
            self._profile.stop_trace()
        self._profile = None

    def count(self) -> int:
        """Stop without a file, and count the events that were recorded."""
        recorded = self._profile
        self.discard()
        return len(recorded.profiler.kineto_results.events())


def record_device_history(*, on: bool) -> None:
    """Let the device's allocator keep where its blocks were allocated, for a snapshot when memory runs out, or end that."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        if on:
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY_ENTRIES)
        else:
            torch.cuda.memory._record_memory_history(enabled=None)


def _all_threads_config() -> Any:
    """The option to watch all threads; None where this torch has none."""
    try:
        return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None


@contextmanager
def _without_operators() -> Iterator[None]:
    """Let a profiler that starts inside record ranges alone of what the host does: torch offers that for none of its classes."""
    module: Any = torch.autograd.profiler
    enable = module._enable_profiler
    module._enable_profiler = lambda config, activities: enable(config, activities, {_RANGES})
    try:
        yield
    finally:
        module._enable_profiler = enable


_RANGES = getattr(getattr(torch._C._profiler, "RecordScope", None), "USER_SCOPE", None)
_CAN_CHOOSE_SCOPES = _RANGES is not None and "scopes" in str(torch._C._autograd._enable_profiler.__doc__)
_CAN_WATCH_ALL_THREADS = _all_threads_config() is not None


def _activities() -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]


_TEARDOWN = "TEARDOWN_CUPTI"
_SAFE_CUDA = (12, 6)
"""Before this version of CUDA graphs crash after a teardown of CUPTI (pytorch pull request 146604)."""


def tears_down_cupti() -> bool:
    """Return whether Kineto detaches CUPTI at its end, so that later steps are fast: as the user says, else where it is safe."""
    version = torch.version.cuda or "0"  # None where torch is not built for CUDA
    is_safe = tuple(map(int, version.split(".")[:2])) >= _SAFE_CUDA
    return os.environ.get(_TEARDOWN, "1" if is_safe else "0") == "1"


def _compress(source: Path, target: Path) -> None:
    """Gzip a Kineto file without the path of its own that Kineto writes at the end."""
    size = source.stat().st_size
    with source.open("rb") as raw, gzip.open(target, "wb", compresslevel=COMPRESSION) as packed:
        head = max(0, size - _TAIL_BYTES)
        while head > 0:
            block = raw.read(min(head, _BLOCK_BYTES))
            packed.write(block)
            head -= len(block)
        tail = raw.read()
        name = json.dumps(target.name.removeprefix(".").removesuffix(".tmp")).encode()
        packed.write(re.sub(rb'("traceName":\s*)"[^"]*"', lambda match: match[1] + name, tail))
