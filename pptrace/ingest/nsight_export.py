"""Reports of Nsight Systems (``.nsys-rep``, ``.qdrep``) → the SQLite that nsys itself exports them to."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pptrace.errors import TraceError

SQLITE_MAGIC = b"SQLite format 3\0"
REPORT_MAGIC = (b"NVIDIA Tegra Profiler Report", b"NVIDIA Nsight Systems Report")
REPORT_SUFFIXES = (".nsys-rep", ".qdrep")
_SHOWN = 160


def is_report(path: Path, start: bytes) -> bool:
    """Whether a file that begins so is a report that only nsys can read."""
    return start.startswith(REPORT_MAGIC) or path.name.endswith(REPORT_SUFFIXES)


def export_command(nsys: str, report: Path, target: Path) -> list[str]:
    return [nsys, "export", "--type", "sqlite", "--force-overwrite", "true", "-o", str(target), str(report)]


@contextmanager
def exported(report: Path) -> Iterator[Path]:
    """The SQLite export of a report, for as long as it is needed.

    Raises:
        TraceError: there is no nsys, or it cannot export the report.
    """
    nsys = shutil.which("nsys")
    if nsys is None:
        raise TraceError(
            f"{report}: a report of Nsight Systems, which only its own nsys can read, and there is no 'nsys' on PATH; run "
            f"'nsys export --type sqlite {report.name}' where Nsight Systems is installed, and give the .sqlite file"
        )
    with tempfile.TemporaryDirectory(prefix="pptrace-") as folder:
        target = Path(folder) / "report.sqlite"
        run_export(nsys, report, target)
        yield target


def run_export(nsys: str, report: Path, target: Path) -> None:
    """Export ``report`` to ``target``.

    Raises:
        TraceError: nsys fails, or leaves no file.
    """
    command = export_command(nsys, report.absolute(), target)
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError as err:
        raise TraceError(f"{report}: {nsys} cannot be run ({err.strerror}); check its installation") from err
    if done.returncode != 0 or not target.is_file():
        raise TraceError(
            f"{report}: 'nsys export' gave no SQLite file ({_last_line(done.stderr) or _last_line(done.stdout)}); "
            "is the report whole, and this nsys as new as the one that wrote it?"
        )


def _last_line(output: bytes) -> str:
    lines = [
        line.strip() for line in output.decode("utf-8", "replace").replace("\r", "\n").splitlines() if line.strip()
    ]
    return lines[-1][:_SHOWN] if lines else ""
