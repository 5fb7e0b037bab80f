"""Setting that every part of the GPU run is given."""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.gpu.checks import Check, Checks, Outcome

RESERVE_S = 8.0
"""Time that a part keeps of its limit, to end by itself, s."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Setting of a part: ``dry`` is the smallest size over gloo on CPUs, else there is a GPU. ``work`` is shared by all parts."""

    work: Path
    checks: Checks
    dry: bool
    ends_at: float

    @property
    def left_s(self) -> float:
        """Seconds left to this part."""
        return self.ends_at - time.monotonic()

    def skip_rest(self, names: Sequence[str]) -> None:
        """Write down what there was no time for."""
        for name in names:
            self.checks.add(Check(name, Outcome.SKIPPED, detail="no time left to this part"))


def run_part(part: Callable[[Setting], None], arguments: Sequence[str]) -> int:
    """Run a part as its own program; the exit code is 1 if a check failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True, help="folder that all parts share")
    parser.add_argument("--checks", type=Path, required=True, help="file that gets a line for each check")
    parser.add_argument("--limit", type=float, required=True, help="seconds")
    parser.add_argument("--dry-run", action="store_true", help="on CPUs, as small as can be")
    options = parser.parse_args(arguments)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    checks = Checks(options.checks)
    setting = Setting(options.work, checks, options.dry_run, time.monotonic() + options.limit - RESERVE_S)
    part(setting)
    return int(checks.any_failed)


def main(part: Callable[[Setting], None]) -> None:
    sys.exit(run_part(part, sys.argv[1:]))
