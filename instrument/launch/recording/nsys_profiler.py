"""A rank's side of a recording that nsys makes from outside."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from instrument.launch.record import write_json

FACTS_SUFFIX = ".nsys.json"


class NsysProfiler:
    """Begins and ends the capture where there is CUDA, and writes what the rank knows about itself.

    ``path`` gets the rank's facts as JSON: ``{"pid", "facts"}``. ``control_dir`` is where the ranks of a node see who has left
    the chosen steps: the last one ends the recording for all.
    """

    def __init__(self, path: Path, control_dir: Path, local_rank: int, num_local: int) -> None:
        self.path = path
        self._control_dir = control_dir
        self._local_rank = local_rank
        self._num_local = num_local
        self._recording = False

    @property
    def recording(self) -> bool:
        return self._recording

    @property
    def settings(self) -> dict[str, object]:
        return {"profiler": "nsys"}

    @property
    def takes_annotations(self) -> bool:
        return False

    def prepare(self) -> None:
        """Do nothing: nsys came with the process."""

    def release(self) -> None:
        """Do nothing: nothing was prepared."""

    def start(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        self._recording = True

    def stop(self, metadata: dict[str, object], *, blocked: bool = False) -> None:
        """Leave the recording; ``metadata`` goes into the file. Waits for the device unless the main thread is ``blocked``."""
        write_json(self.path, {"pid": os.getpid(), "facts": metadata})
        self._leave(wait=not blocked)

    def discard(self) -> None:
        """Leave without a file."""
        self._leave(wait=False)

    def _leave(self, *, wait: bool) -> None:
        self._recording = False
        (self._control_dir / f"rank{self._local_rank}.left").touch()
        if not torch.cuda.is_available():
            return
        if wait:
            torch.cuda.synchronize()
        if len(list(self._control_dir.glob("rank*.left"))) >= self._num_local:
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
