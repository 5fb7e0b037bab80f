"""Export recordings of Nsight Systems (``.nsys-rep``, ``.qdrep``, ``.qdstrm``) to SQLite with nsys."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pptrace.errors import TraceError
from pptrace.nsys import REPORT_SUFFIXES, STREAM_SUFFIX, export_report, import_stream
from pptrace.regular import open_regular

STREAM_MAGIC = b"U3w{[END]NVIDIA Nsight Systems Stream"
REPORT_MAGIC = (b"NVIDIA Tegra Profiler Report", b"NVIDIA Nsight Systems Report")
RECORDED_MAGIC = (*REPORT_MAGIC, STREAM_MAGIC)
RECORDED_SUFFIXES = (*REPORT_SUFFIXES, STREAM_SUFFIX)


def is_recorded(path: Path, start: bytes) -> bool:
    """Return whether a file that begins with these bytes is a report or its stream, which only nsys can read."""
    return start.startswith(RECORDED_MAGIC) or path.name.endswith(RECORDED_SUFFIXES)


@contextmanager
def exported(report: Path) -> Iterator[Path]:
    """Context of the SQLite export of a report or a stream; it is deleted at the end.

    Raises:
        TraceError: there is no nsys, or it cannot import or export the file.
    """
    nsys = shutil.which("nsys")
    with open_regular(report) as file:
        start = file.read(len(STREAM_MAGIC))
    is_stream = start == STREAM_MAGIC or (report.name.endswith(STREAM_SUFFIX) and not start.startswith(REPORT_MAGIC))
    if nsys is None and not is_stream:
        raise TraceError(
            f"{report}: a report of Nsight Systems, which only its own nsys can read, and there is no 'nsys' on PATH; run "
            f"'nsys export --type sqlite {report.name}' where Nsight Systems is installed, and give the .sqlite file"
        )
    if nsys is None:
        raise TraceError(
            f"{report}: a recording of Nsight Systems that its nsys did not import, and there is no 'nsys' on PATH; run "
            f"'QdstrmImporter -i {report.name}' and then 'nsys export --type sqlite' where Nsight Systems is installed, and "
            "give the .sqlite file"
        )
    with tempfile.TemporaryDirectory(prefix="pptrace-") as folder:
        source = report
        if is_stream:
            source = Path(folder) / "report.nsys-rep"
            import_stream(nsys, report, source)
        target = Path(folder) / "report.sqlite"
        try:
            export_report(nsys, source, target)
        except TraceError as err:
            raise TraceError(str(err).replace(str(source), str(report))) from err
        yield target
