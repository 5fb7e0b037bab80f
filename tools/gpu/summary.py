"""Files that a GPU run leaves: ``summary.json`` for programs, ``summary.txt`` for people, and two archives."""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.gpu.checks import Check, Outcome

SCHEMA = "pptrace.gpu-run/1"
_DETAIL = 300


@dataclass(frozen=True, slots=True)
class PartResult:
    """End of a part; ``note`` says why it was skipped or failed beyond its checks."""

    name: str
    about: str
    outcome: Outcome
    seconds: float
    limit_s: float
    note: str
    checks: tuple[Check, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    dry: bool
    seconds: float
    budget_s: float
    parts: tuple[PartResult, ...]

    @property
    def outcome(self) -> Outcome:
        outcomes = {part.outcome for part in self.parts}
        return next((it for it in (Outcome.FAILED, Outcome.PASSED) if it in outcomes), Outcome.SKIPPED)


def write(summary: Summary, folder: Path, work: Path) -> None:
    """Write or replace the files of a summary: few files, flat, so that they are easily brought back from a machine."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"schema": SCHEMA, "outcome": summary.outcome, **asdict(summary)}
    _replace(folder / "summary.json", (json.dumps(content, indent=1) + "\n").encode())
    _replace(folder / "summary.txt", to_text(summary).encode())
    _pack(folder / "samples.tar.gz", work, sorted((work / "samples").glob("*")))
    logs = [*(work / "logs").glob("*"), *work.glob("*/*/report.*"), *work.glob("*/report.*"), *work.glob("*.json")]
    _pack(folder / "logs.tar.gz", work, sorted(path for path in logs if path.suffix != ".html"))


def to_text(summary: Summary) -> str:
    """The summary for people."""
    kind = "dry run on CPUs" if summary.dry else "run"
    lines = [f"GPU {kind}: {summary.outcome} in {summary.seconds:.0f} of {summary.budget_s:.0f} s", ""]
    lines += [_part_line(part) for part in summary.parts]
    for part in summary.parts:
        shown = [check for check in part.checks if check.outcome is not Outcome.PASSED]
        figures = [check for check in part.checks if check.outcome is Outcome.PASSED and check.figures]
        if not (part.checks or part.note):
            continue
        lines += ["", f"{part.name}: {part.note}".rstrip(": ")]
        lines += [f"  {check.outcome:8} {check.name}: {_short(check.detail)}" for check in shown]
        lines += [f"  {check.name}: {_short(json.dumps(check.figures, ensure_ascii=False))}" for check in figures]
    return "\n".join(lines) + "\n"


def _part_line(part: PartResult) -> str:
    counts = Counter(check.outcome for check in part.checks)
    shown = ", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome if counts[outcome]) or "no checks"
    return f"{part.outcome:8} {part.seconds:6.1f} s  {part.name:12} {part.about} ({shown})"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _DETAIL else f"{line[:60]} … {line[60 - _DETAIL :]}"


def _pack(target: Path, root: Path, paths: Sequence[Path]) -> None:
    """An archive of files and folders, named from ``root`` on; none where there are none."""
    if not paths:
        return
    scratch = target.with_name(f".{target.name}.tmp")
    with tarfile.open(scratch, "w:gz") as archive:
        for path in paths:
            archive.add(path, str(path.relative_to(root)), filter=_nameless)
    scratch.replace(target)


def _nameless(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without the user's name."""
    entry.uname = entry.gname = ""
    entry.uid = entry.gid = 0
    return entry


def _replace(target: Path, content: bytes) -> None:
    scratch = target.with_name(f".{target.name}.tmp")
    scratch.write_bytes(content)
    scratch.replace(target)


def outcome_of(code: int | None, checks: Iterable[Check]) -> Outcome:
    """A part fails with its exit code or a check; it is skipped where all of its checks are."""
    outcomes = {check.outcome for check in checks}
    if code != 0 or Outcome.FAILED in outcomes:
        return Outcome.FAILED
    return Outcome.PASSED if Outcome.PASSED in outcomes else Outcome.SKIPPED
