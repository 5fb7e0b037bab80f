"""Records that a part of the GPU run writes while it runs: one line of JSON for each check, so that a part that is killed
leaves what it had.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

_TAIL = 1500


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried; ``detail`` says why it failed or was skipped, ``figures`` what was measured."""

    name: str
    outcome: Outcome
    seconds: float = 0.0
    detail: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


class Skip(Exception):  # noqa: N818 — nothing went wrong
    """This check cannot be made here; the text says why."""


class Checks:
    """Writes the checks of one part to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.any_failed = False
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, check: Check) -> None:
        self.any_failed |= check.outcome is Outcome.FAILED
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(check)) + "\n")
        print(f"{check.outcome:8} {check.seconds:6.1f} s  {check.name}  {_first_line(check.detail)}", flush=True)

    @contextmanager
    def check(self, name: str) -> Iterator[dict[str, Any]]:
        """Around one check: what is raised inside makes it failed, or skipped. Gives its figures, to be filled in."""
        figures: dict[str, Any] = {}
        started = time.monotonic()
        outcome, detail = Outcome.PASSED, ""
        try:
            yield figures
        except Skip as reason:
            outcome, detail = Outcome.SKIPPED, str(reason)
        except Exception as err:
            text = str(err) or traceback.format_exc()
            outcome, detail = Outcome.FAILED, f"{type(err).__name__}: {text[-_TAIL:]}"
        self.add(Check(name, outcome, round(time.monotonic() - started, 2), detail, figures))


def read_checks(path: Path) -> list[Check]:
    """The checks in a file; of one that was cut off in the middle of a line the whole lines."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return list(_read(lines))


def _read(lines: Iterable[str]) -> Iterator[Check]:
    for line in lines:
        try:
            content = json.loads(line)
            yield Check(**{**content, "outcome": Outcome(content["outcome"])})
        except (ValueError, TypeError, KeyError):
            continue


def _first_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:160] if lines else ""
