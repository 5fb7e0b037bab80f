"""A path that is no regular file is refused at once, wherever a file is read that a directory names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pptrace.errors import PptraceError
from pptrace.ingest.common.byte_source import ByteSource, first_bytes, num_text_bytes
from pptrace.ingest.flight_recorder.dump import read_dump
from pptrace.ingest.inputs.resolve import open_inputs
from pptrace.ingest.nsight.reader import read_nsight
from pptrace.ingest.op_tables.files import read_frame, read_pptrace_json
from pptrace.ingest.op_tables.primus import read_primus
from pptrace.live_records.file import LiveFile
from pptrace.regular import open_regular, read_regular
from pptrace.schedule.text import read_csv
from pptrace.workflow.live.follow import status_of
from tests.support.programs import SAMPLES, one_line, pptrace_here

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no named pipes")


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A pipe that nobody writes to: who opens it as a file waits for ever."""
    path = tmp_path / "run.json"
    os.mkfifo(path)
    return path


def test_regular_files_alone_are_read(pipe: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"content")
    assert read_regular(file) == b"content"
    with open_regular(file, 0) as opened:
        assert (opened.read(3), opened.fileno() > 2) == (b"con", True)
    for path, reason in ((pipe, "no regular file"), (Path(os.devnull), "no regular file"), (tmp_path, "directory")):
        with pytest.raises(OSError, match=reason):
            read_regular(path)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "read", [ByteSource, first_bytes, read_dump, read_nsight, read_frame, read_pptrace_json, read_primus, read_csv]
)
def test_every_reader_refuses_a_pipe_in_one_line(read: Callable[[Path], object], pipe: Path) -> None:
    with pytest.raises(PptraceError, match=r"run\.json: cannot be read \(it is a pipe or a device.*expected") as caught:
        read(pipe)
    assert "\n" not in str(caught.value)


def test_what_is_asked_of_a_run_on_the_way_does_not_wait_for_a_pipe(pipe: Path) -> None:
    assert status_of(pipe.parent) is None
    assert num_text_bytes(pipe) == 0
    live = pipe.with_name("rank0.live")
    os.mkfifo(live)
    assert list(LiveFile(live).poll()) == []


def test_a_run_directory_whose_run_json_is_a_pipe_is_read_without_it(pipe: Path) -> None:
    for trace in (SAMPLES / "1f1b_p2").glob("*.json.gz"):
        (pipe.parent / trace.name).symlink_to(trace)
    assert "run.json: unreadable; expected a regular file of JSON" in "".join(open_inputs([pipe.parent]).warnings)
    ended = pptrace_here("analyze", pipe.parent)
    assert ended.code == 0
    assert "run.json: unreadable" in ended.out + ended.err
    assert "a pipe or a device" in one_line(pptrace_here("analyze", pipe), 1)
