from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from dashboards.serve import bind, open_browser, url_of
from pptrace.errors import PptraceError, UsageError
from tests.support.noisy_runs import NoisyRun
from tests.support.programs import SAMPLES, one_line, pptrace_here

ENDS_S = 180  # of a machine as busy as may be
PPTRACE = [sys.executable, "-c", "from pptrace.cli.main import main; main()", "dashboard"]


def start(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PPTRACE, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    with process:
        try:
            return process.communicate(timeout=ENDS_S)
        finally:
            process.kill()


def test_a_dashboard_for_others_warns_and_lets_in_who_knows_its_token() -> None:
    """The address that is printed has the token; what is asked is under way when Ctrl-C ends it."""
    process = start(str(SAMPLES / "1f1b_p2"), "--host", "0.0.0.0", "--port", "0", "--no-open", "--token", "auto")
    address = process.stdout.readline().split(" at ")[1].split()[0]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", address)
    with urlopen(address, timeout=ENDS_S) as answer:
        assert "HttpOnly" in answer.headers["Set-Cookie"]
    with pytest.raises(HTTPError, match="401"):
        urlopen(address.partition("?")[0], timeout=ENDS_S)
    with socket.create_connection(("127.0.0.1", int(address.split(":")[2].partition("/")[0])), timeout=ENDS_S) as busy:
        busy.sendall(b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n")
        process.send_signal(signal.SIGINT)
        out, err = end(process)
    assert (process.returncode, out) == (0, "")
    assert err.startswith("pptrace: warning: --host: everybody who reaches this machine")
    assert len(err.splitlines()) == 1


def test_a_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = pptrace_here("dashboard", tmp_path, "--port", str(port), "--no-open")
    assert ended.out == ""
    line = one_line(ended, 1)
    assert f"127.0.0.1:{port}" in line
    assert "--port" in line


def test_a_path_where_nothing_is_ends_the_command_as_it_ends_analyze(tmp_path: Path, run_p4: Path) -> None:
    missing = tmp_path / "nowhere"
    ended = pptrace_here("dashboard", run_p4, missing, "--port", "0", "--no-open")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == pptrace_here("analyze", missing).err
    assert ended.err.startswith(f"pptrace: {missing}: not found; expected")


def test_a_second_run_that_is_not_there_ends_the_command_too(tmp_path: Path, run_p4: Path) -> None:
    ended = pptrace_here("dashboard", run_p4, "--compare", tmp_path / "nowhere", "--port", "0", "--no-open")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith(f"pptrace: {tmp_path / 'nowhere'}: not found; expected")


@pytest.mark.parametrize(
    ("host", "port", "error"), [("127.0.0.1", 70_000, UsageError), ("no.such.host.invalid", 0, PptraceError)]
)
def test_impossible_addresses_are_refused(host: str, port: int, error: type[PptraceError]) -> None:
    with pytest.raises(error, match="expected"):
        bind(host, port)


def test_the_address_of_every_interface_is_shown_as_this_machines() -> None:
    with bind("0.0.0.0", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}/"


def test_no_browser_is_opened_without_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    opened: list[str] = []
    assert not open_browser("http://x/", lambda url: bool(opened.append(url)))
    assert opened == []
    monkeypatch.setenv("DISPLAY", ":0")
    thread = open_browser("http://x/", lambda url: bool(opened.append(url)))
    thread.join(ENDS_S)
    assert opened == ["http://x/"]


def test_several_runs_to_compare_with_are_refused_in_one_line(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        (tmp_path / "runs" / str(seed)).mkdir(parents=True)
        NoisyRun(steps=2).write(tmp_path / "runs" / str(seed) / "ops.csv", seed)
    one = tmp_path / "runs" / "1"
    for paths in ((one, "--compare", tmp_path / "runs"), (tmp_path / "runs", "--compare", one)):
        ended = pptrace_here("dashboard", *paths, "--port", "0", "--no-open")
        assert "runs: holds 3 runs; --compare compares one run with another" in one_line(ended, 2)
