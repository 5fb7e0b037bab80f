"""The programs of Nsight Systems, by stand-ins of them in the layouts of its packages."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest

from pptrace.errors import TraceError
from pptrace.nsys import IMPORTER, exported_report, find_importer, run_program


def put(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def debian(root: Path, importer: str) -> Path:
    """/usr/bin/nsys → lib/nsight-systems/bin/nsys → target-linux-x64/nsys, whose folder is a link out of the package."""
    program = put(root / "lib" / "arch" / "nsight-systems" / "target-linux-x64" / "nsys", 'cp "$8" "$7"')
    package = root / "lib" / "nsight-systems"
    put(package / "host-linux-x64" / IMPORTER, importer)
    (package / "target-linux-x64").symlink_to("../arch/nsight-systems/target-linux-x64")
    (package / "bin").mkdir()
    (package / "bin" / "nsys").symlink_to("../target-linux-x64/nsys")
    (root / "bin").mkdir()
    (root / "bin" / "nsys").symlink_to("../lib/nsight-systems/bin/nsys")
    assert program.samefile(root / "bin" / "nsys")
    return root / "bin" / "nsys"


COPY = 'cp "$3" "$5"'
"""Of an importer: -f -i STREAM -o REPORT."""


@pytest.fixture(autouse=True)
def no_importer_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins need cp alone."""
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "cp").symlink_to(str(shutil.which("cp")))
    monkeypatch.setenv("PATH", str(folder))


def test_the_importer_is_found_over_the_links_of_a_package(tmp_path: Path) -> None:
    result = find_importer(str(debian(tmp_path, COPY)))
    assert result.samefile(tmp_path / "lib" / "nsight-systems" / "host-linux-x64" / IMPORTER)


def test_the_importer_of_nvidia_s_own_layout_is_found_and_one_on_the_path_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nsys = put(tmp_path / "2026.1" / "target-linux-x64" / "nsys", "")
    assert find_importer(str(nsys)) is None
    elsewhere = put(tmp_path / "elsewhere" / IMPORTER, COPY)
    monkeypatch.setenv("PATH", str(elsewhere.parent))
    assert find_importer(str(nsys)) == elsewhere
    host = put(tmp_path / "2026.1" / "host-linux-x64" / IMPORTER, COPY)
    assert find_importer(str(nsys)) == host


def test_what_nsys_left_is_exported_from_whatever_it_is(tmp_path: Path) -> None:
    nsys, stem = str(debian(tmp_path, COPY)), tmp_path / "run.1" / "node0"
    stem.parent.mkdir()
    assert exported_report(nsys, stem) is None
    stem.with_name("node0.qdstrm").write_text("recorded")
    export = exported_report(nsys, stem)
    assert export == stem.with_name("node0.sqlite")
    assert export.read_text() == "recorded"
    assert sorted(path.name for path in stem.parent.iterdir()) == ["node0.nsys-rep", "node0.sqlite"]


def test_an_importer_that_fails_or_is_missing_is_one_line(tmp_path: Path) -> None:
    nsys, stem = debian(tmp_path, "echo Processing; echo it is broken >&2; exit 1"), tmp_path / "node0"
    stream = stem.with_name("node0.qdstrm")
    stream.write_text("recorded")
    with pytest.raises(TraceError, match=r"node0.qdstrm: QdstrmImporter made no report of it \(it is broken\)"):
        exported_report(str(nsys), stem)
    (tmp_path / "lib" / "nsight-systems" / "host-linux-x64" / IMPORTER).unlink()
    with pytest.raises(TraceError, match="there is no QdstrmImporter next to nsys or on PATH"):
        exported_report(str(nsys), stem)
    assert stream.read_text() == "recorded"


def test_a_program_that_takes_too_long_is_ended_with_its_children() -> None:
    slow = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    began = time.monotonic()
    with pytest.raises(TraceError, match="took longer than 1 s and was ended"):
        run_program([sys.executable, "-c", slow], timeout_s=1)
    assert time.monotonic() - began < 20  # a child that lived would hold the pipe of its output
