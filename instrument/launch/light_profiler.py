"""A light recording: pptrace's ranges by themselves, and what the device did, without operators."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from instrument.launch.mark_log import MarkLog
from instrument.launch.profiler import COMPRESSION, Profiler, tear_down_cupti
from instrument.launch.script_profilers import by_pptrace
from pptrace.marks import METADATA_KEY

_EVENTS = '"traceEvents": ['


class ChoosingProfiler:
    """Records lightly where ``suffices`` says so when it is prepared, else everything."""

    def __init__(self, full: Profiler, light: Profiler, suffices: Callable[[], bool]) -> None:
        self._full, self._light, self._suffices = full, light, suffices
        self._chosen: Profiler | None = None

    @property
    def _profiler(self) -> Profiler:
        return self._chosen or self._full

    @property
    def path(self) -> Path:
        return self._profiler.path

    @path.setter
    def path(self, path: Path) -> None:
        self._full.path = self._light.path = path

    @property
    def recording(self) -> bool:
        return self._profiler.recording

    @property
    def settings(self) -> dict[str, object]:
        return self._profiler.settings

    @property
    def takes_annotations(self) -> bool:
        return self._profiler.takes_annotations

    def prepare(self) -> None:
        self._chosen = self._chosen or (self._light if self._suffices() else self._full)
        self._chosen.prepare()

    def release(self) -> None:
        self._profiler.release()

    def start(self) -> None:
        self._chosen = self._chosen or (self._light if self._suffices() else self._full)
        self._chosen.start()

    def stop(self, metadata: dict[str, object], *, blocked: bool = False) -> None:
        self._profiler.stop(metadata, blocked=blocked)

    def discard(self) -> None:
        self._profiler.discard()


class LightProfiler:
    """Records once and writes ``path`` (gzip JSON, as Kineto's), whole or not at all.

    Without a device no profiler runs. With one, Kineto records kernels, copies and the calls that launch them; its times are
    those of the wall clock, as the ranges' are.
    """

    def __init__(self, path: Path, log: MarkLog) -> None:
        """``log`` gets the ranges while this records."""
        self.path = path
        self._log = log
        self._device: Any = None
        self._recording = False

    @property
    def recording(self) -> bool:
        return self._recording

    @property
    def takes_annotations(self) -> bool:
        return self._recording

    @property
    def settings(self) -> dict[str, object]:
        activities = ["CUDA"] if torch.cuda.is_available() else []
        return {"profiler": "torch", "level": "light", "activities": activities, "record_shapes": False}

    def prepare(self) -> None:
        if self._device is None and torch.cuda.is_available():
            with by_pptrace():
                self._device = profile(activities=[ProfilerActivity.CUDA])
                self._device.prepare_trace()

    def release(self) -> None:
        if self._device is not None and not self._recording:
            with by_pptrace():
                self._device.start_trace()
                self._device.stop_trace()
            self._device = None

    def start(self) -> None:
        self.prepare()
        if self._device is not None:
            with by_pptrace():
                self._device.start_trace()
        self._log.clear()
        self._log.is_on = self._recording = True

    def stop(self, metadata: dict[str, object], *, blocked: bool = False) -> None:
        self._log.is_on = self._recording = False
        scratch = self.path.with_name(f".{self.path.name}.tmp")
        try:
            with gzip.open(scratch, "wt", encoding="utf-8", compresslevel=COMPRESSION) as file:
                head, tail = self._document(metadata, blocked=blocked)
                file.write(head)
                file.write(",\n".join(self._log.events()))
                file.write(tail)
            scratch.replace(self.path)
        finally:
            scratch.unlink(missing_ok=True)
            self._log.clear()
            self._device = None

    def discard(self) -> None:
        self._log.is_on = self._recording = False
        if self._device is not None:
            with by_pptrace():
                self._device.stop_trace()
            self._device = None
        self._log.clear()

    def _document(self, metadata: dict[str, object], *, blocked: bool) -> tuple[str, str]:
        """What stands before the ranges in the file, and behind them."""
        if self._device is None:
            return f'{{"schemaVersion": 1, {json.dumps(METADATA_KEY)}: {json.dumps(metadata)}, {_EVENTS}\n', "\n]}"
        device = self._device
        if blocked:
            device.profiler.use_device = None  # all that it still decides is whether stopping synchronises
        device.add_metadata_json(METADATA_KEY, json.dumps(metadata))
        tear_down_cupti()
        raw = self.path.with_name(f".{self.path.name}.raw")
        try:
            with by_pptrace():
                device.stop_trace()
                device.export_chrome_trace(str(raw))
            head, events, tail = raw.read_text(encoding="utf-8").partition(_EVENTS)
        finally:
            raw.unlink(missing_ok=True)
        return f"{head}{events}\n", f",\n{tail}"
