"""Writing what a command was asked for."""

from __future__ import annotations

import sys
from pathlib import Path

from pptrace.errors import PptraceError


def write_text(target: str, text: str) -> None:
    """Write to a file, or to stdout for "-".

    Raises:
        PptraceError: the file cannot be written.
    """
    if target == "-":
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as err:
        raise PptraceError(f"{target}: cannot be written ({err.strerror}); give another file") from None
