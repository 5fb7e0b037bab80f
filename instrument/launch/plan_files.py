"""Plans among a script's arguments, checked before any process starts: a broken one would hang all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pptrace.errors import ScheduleError
from pptrace.schedule.actions import parse_action
from pptrace.schedule.validate import read_sound_csv

_MOST_BYTES = 64 * 2**20


def check_plan_files(arguments: Sequence[str]) -> None:
    """Check every argument that names a CSV file most of whose cells are actions, in torch's exchange format.

    Raises:
        ScheduleError: a plan that lacks actions or cannot run to its end, with the place and the reason.
    """
    for path in _csv_files(arguments):
        if _looks_like_a_plan(path):
            read_sound_csv(path)


def _csv_files(arguments: Sequence[str]) -> Iterator[Path]:
    for argument in arguments:
        name = argument.partition("=")[2] if argument.startswith("-") else argument
        if name.endswith(".csv") and Path(name).is_file() and Path(name).stat().st_size < _MOST_BYTES:
            yield Path(name)


def _looks_like_a_plan(path: Path) -> bool:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return False
    cells = [cell.strip() for line in text.splitlines() for cell in line.split(",") if cell.strip()]
    return bool(cells) and 2 * sum(map(_is_action, cells)) > len(cells)


def _is_action(cell: str) -> bool:
    try:
        parse_action(cell)
    except ScheduleError:
        return False
    return True
