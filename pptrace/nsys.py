"""The programs of Nsight Systems: what they are called with, and what they leave.

    nsys profile ─► .nsys-rep (.qdrep) ─ nsys export ─► .sqlite
                 └► .qdstrm ─ QdstrmImporter ─► .nsys-rep        where nsys finds no importer to run itself

Needs neither torch nor an installed Nsight Systems to be imported. The recorder's launcher and the reader of reports share it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pptrace.errors import TraceError

REPORT_SUFFIXES = (".nsys-rep", ".qdrep")
STREAM_SUFFIX = ".qdstrm"
RECORDED_SUFFIXES = (*REPORT_SUFFIXES, STREAM_SUFFIX)
STREAM_MAGIC = b"U3w{[END]NVIDIA Nsight Systems Stream"
REPORT_MAGIC = (b"NVIDIA Tegra Profiler Report", b"NVIDIA Nsight Systems Report")
RECORDED_MAGIC = (*REPORT_MAGIC, STREAM_MAGIC)
IMPORTER = "QdstrmImporter"
_MOST_LINKS = 16
_SHOWN = 160


def find_importer(nsys: str | None) -> Path | None:
    """The QdstrmImporter of an installation, else one on PATH; None without any.

    Packages spread an installation over folders that links join, so that nsys does not find its own importer: it is looked for
    next to every link on the way from ``nsys`` to the program itself.
    """
    for folder in _installation_folders(nsys) if nsys else ():
        for host in sorted(folder.glob("host-*")):
            if (program := host / IMPORTER).is_file() and os.access(program, os.X_OK):
                return program
    on_path = shutil.which(IMPORTER)
    return Path(on_path) if on_path else None


def _installation_folders(nsys: str) -> Iterator[Path]:
    """The folders around nsys and around all that its links lead over, nearest first."""
    program = Path(nsys)
    for _ in range(_MOST_LINKS):
        yield from (program.parent, program.parent.parent)
        # A link may lie in a folder that is one itself.
        yield from (program.parent.resolve(), program.parent.resolve().parent)
        if not program.is_symlink():
            return
        with suppress(OSError):
            program = program.parent / program.readlink()


def import_stream(nsys: str | None, stream: Path, report: Path, timeout_s: float | None = None) -> None:
    """Make the ``report`` of what nsys left as a ``stream``.

    Raises:
        TraceError: there is no importer, or it fails.
    """
    importer = find_importer(nsys)
    if importer is None:
        raise TraceError(
            f"{stream}: a recording that nsys could not import, and there is no {IMPORTER} next to nsys or on PATH; install all "
            f"of Nsight Systems (its folder host-linux-x64), or run '{IMPORTER} -i {stream.name}' where it is installed and "
            "give the .nsys-rep file"
        )
    command = [str(importer), "-f", "-i", str(stream.absolute()), "-o", str(report)]
    code, output = run_program(command, timeout_s)
    if code != 0 or not report.is_file():
        raise TraceError(
            f"{stream}: {IMPORTER} made no report of it ({last_line(output)}); is the file whole, and the importer of the "
            "Nsight Systems that wrote it?"
        )


def export_report(nsys: str, report: Path, target: Path, timeout_s: float | None = None) -> None:
    """Export ``report`` to the SQLite file ``target``.

    Raises:
        TraceError: nsys fails, or leaves no file.
    """
    options = ("export", "--type", "sqlite", "--force-overwrite", "true", "-o")
    code, output = run_program([nsys, *options, str(target), str(report.absolute())], timeout_s)
    if code != 0 or not target.is_file():
        raise TraceError(
            f"{report}: 'nsys export' gave no SQLite file ({last_line(output)}); "
            "is the report whole, and this nsys as new as the one that wrote it?"
        )


def exported_report(nsys: str, stem: Path, left: Callable[[], float] | None = None) -> Path | None:
    """The SQLite export of what nsys left under a name without suffix, made here where nsys itself did not; None without any.

    Args:
        nsys: the program.
        stem: what it was given as its output.
        left: how many seconds there are; without it as many as it takes.

    Raises:
        TraceError: nsys left something that cannot be imported or exported.
    """
    export, stream = (stem.with_name(stem.name + suffix) for suffix in (".sqlite", STREAM_SUFFIX))
    if export.is_file():
        return export
    reports = [stem.with_name(stem.name + suffix) for suffix in REPORT_SUFFIXES]
    report = next((each for each in reports if each.is_file()), reports[0])
    if not report.is_file():
        if not stream.is_file():
            return None
        import_stream(nsys, stream, report, left and left())
        stream.unlink()
    export_report(nsys, report, export, left and left())
    return export


def run_program(command: Sequence[str], timeout_s: float | None = None) -> tuple[int, bytes]:
    """Exit code and output of a program; it and its children are killed after ``timeout_s`` seconds, where given.

    Raises:
        TraceError: it cannot be started, or takes too long.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=timeout_s is not None,
        )
    except OSError as err:
        raise TraceError(f"{command[0]} cannot be run ({err.strerror}); check its installation") from err
    with process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except BaseException as err:
            with suppress(ProcessLookupError, PermissionError):
                if timeout_s is None:
                    process.kill()
                else:
                    os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(err, subprocess.TimeoutExpired):
                raise
            raise TraceError(f"{Path(command[0]).name} took longer than {timeout_s:.0f} s and was ended") from err
    return process.returncode, output


def last_line(output: bytes) -> str:
    """The last line that a program wrote, of a progress bar its last state."""
    lines = [
        line.strip() for line in output.decode("utf-8", "replace").replace("\r", "\n").splitlines() if line.strip()
    ]
    return lines[-1][:_SHOWN] if lines else "without a word"
