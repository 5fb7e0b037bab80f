"""Attacks on a server that runs, over sockets: other sites, files that nobody opened, malformed and endless requests."""

from __future__ import annotations

import json
import re
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import dashboards.serve
from dashboards.pages import problem
from dashboards.store import Store
from tests.dashboards.attacker import CALLBACK, PRIVATE, SECRET, Target
from tests.dashboards.synthetic import write_run_json
from tests.support.extent import ALL


def test_pages_of_other_sites_make_no_calls_but_links_are_followed(target: Target) -> None:
    for site in ("cross-site", "same-site"):
        for mode, dest in (("no-cors", "image"), ("cors", "empty"), ("navigate", "iframe"), ("no-cors", "script")):
            headers = {"Sec_Fetch_Site": site, "Sec_Fetch_Mode": mode, "Sec_Fetch_Dest": dest}
            assert target.know("/export/steps.csv", **headers)[0] == 403
        visit = {"Sec_Fetch_Site": site, "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
        assert target.know("/", **visit)[0] == 200
        assert target.know("/", "POST", b"", **visit)[0] == 403
    assert target.know("/export/steps.csv", Sec_Fetch_Site="same-origin", Sec_Fetch_Mode="cors")[0] == 200


OUTSIDE = (
    "/assets/../guard.py",
    "/assets/..%2fguard.py",
    "/assets/%2e%2e/%2e%2e/pyproject.toml",
    "/assets//etc/passwd",
    "/static/../guard.py",
    "/export/../private.json",
    "/export/..%2fprivate.json",
    "/export/%2e%2e%2fprivate.csv",
    "/../private.json",
    "/run/../private.json",
    "/private.json",
    "/timeline-data/find/../../private.json",
    "/timeline-data/tile/..%2f..%2fprivate.json/measured/2/stage/0/20/0",
    "/_dash-component-suites/dash/../../../private.json",
    "/_dash-component-suites/dash/..%2f..%2fdash.py",
    "/_dash-component-suites/dash/dash.py",
    "/_dash-component-suites/os/path.py",
    "/_dash-component-suites/dashboards/guard.py",
    "/etc/passwd",
    "//etc/passwd",
    "/\x00",
    "/%00",
    "/%ff%fe",
)


@pytest.mark.parametrize("path", OUTSIDE)
def test_what_was_not_opened_is_not_read(path: str, target: Target) -> None:
    answer = target.raw(
        f"GET {path} HTTP/1.1\r\nHost: {target.host}\r\nAuthorization: Bearer {SECRET}\r\nConnection: close\r\n\r\n".encode(
            "latin-1"
        )
    )
    status = int(answer.split()[1])
    assert status in (200, 400, 404)
    assert not re.search(rb"root:|^import |" + PRIVATE.encode(), answer, re.MULTILINE)
    if status == 200:
        assert b"text/html" in answer, "the app's start page"


def test_a_run_that_names_a_file_elsewhere_does_not_have_it(tmp_path: Path) -> None:
    (tmp_path / "private.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": PRIVATE}))
    run = tmp_path / "run"
    run.mkdir()
    names = ("../private.json", str(tmp_path / "private.json"), "x/../../private.json")
    changes = {f"rank{rank}": {"trace": name, "script_trace": name} for rank, name in enumerate(names)}
    write_run_json(run, 3, **changes)
    text = str(problem.layout(Store([run]).get()))
    assert "names no trace that exists" in text
    assert PRIVATE not in text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"GET / HTTP/1.1\r\nHost: {host}\r\nX: " + b"a" * 2**17 + b"\r\n\r\n", b"431"),
        (b"GET /" + b"a" * 2**17 + b" HTTP/1.1\r\nHost: {host}\r\n\r\n", b"431"),
        (b"POST /_dash-update-component HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1048577\r\n\r\n", b"413"),
        (b"POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: 99999999999999999999\r\n\r\n", b"413"),
        (b"POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: gzip\r\n\r\n", b"501"),
        (b"POST / HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", b"400"),
        (b"GET /\r\n\r\n\r\n", b"40"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
        (b"GET / HTTP/9.9\r\nHost: {host}\r\n\r\n", b"40"),
        (b"GET / HTTP/1.1\r\nHost : {host}\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: {host}\r\nX\x00: a\r\n\r\n", b"400"),
    ],
)
def test_what_is_too_large_or_no_request_is_refused_before_it_is_read(
    content: bytes, expected: bytes, target: Target
) -> None:
    answer = target.raw(content.replace(b"{host}", target.host.encode()))
    assert answer.split(b" ", 2)[1].startswith(expected)
    assert b"Traceback" not in answer
    assert target.know("/_reload-hash")[0] == 200


def test_a_body_in_endless_pieces_is_cut_off(target: Target) -> None:
    head = f"POST {CALLBACK} HTTP/1.1\r\nHost: {target.host}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    piece = b"10000\r\n" + b"a" * 65_536 + b"\r\n"
    assert target.raw(head + piece * 20).split()[1] == b"413"


def test_more_half_headers_than_connections_keep_nobody_waiting(target: Target) -> None:
    """The oldest idle connections go when there are too many: who asks then is answered at once."""
    with ExitStack() as stack:
        for _ in range(450):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", target.port), timeout=60))
            connection.sendall(b"GET / HTTP/1.1\r\nX: ")
        begun_s = time.monotonic()
        assert target.know("/_reload-hash")[0] == 200
        assert time.monotonic() - begun_s < 20, "of a machine as busy as may be; idle connections had a minute"


def test_a_header_that_comes_in_drops_has_a_deadline(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboards.serve, "_HEADER_S", 0.5)
    with socket.create_connection(("127.0.0.1", target.port), timeout=60) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\n")
        slow.settimeout(0.1)
        begun_s, is_open = time.monotonic(), True
        while time.monotonic() - begun_s < 60 and is_open:
            try:
                slow.sendall(b"X")
                is_open = slow.recv(1) != b""
            except TimeoutError:
                continue
            except ConnectionError:
                is_open = False
        assert not is_open


def test_a_server_names_neither_itself_nor_its_version(target: Target) -> None:
    _, headers, _ = target.ask("/")
    assert "Server" not in headers


VALUES = (
    None,
    -1,
    1e308,
    "",
    "<script>",
    "9" * 400,
    [1],
    {"a": 1},
    "\ud800",
    *(0, True, [], {}, "\x00", 10**30, 0.5) * ALL,
)


def calm_call(output: str, callback: Any) -> dict[str, Any]:
    """The request of a callback, of which no input has a value."""
    parts = [part.rsplit(".", 1) for part in output.strip(".").split("...")]
    outputs: Any = [{"id": name, "property": what.partition("@")[0]} for name, what in parts]
    return {
        "output": output,
        "outputs": outputs if output.startswith("..") else outputs[0],
        "inputs": [{**entry, "value": None} for entry in callback["inputs"]],
        "state": [{**entry, "value": None} for entry in callback["state"]],
    }


@pytest.mark.parametrize("clicks", [-1, 10**30])
def test_clicks_that_nobody_makes_start_nothing(target: Target, clicks: int) -> None:
    (output,) = (output for output in target.app.callback_map if output.startswith("try-verified."))
    call = calm_call(output, target.app.callback_map[output])
    (button,) = (entry for entry in call["inputs"] if entry["property"] == "n_clicks")
    assert target.call(call) in (200, 204)
    button["value"] = clicks
    assert target.call(call) == 400


def test_no_value_of_a_callback_makes_the_server_fail(target: Target) -> None:
    """Every callback with hostile values of every input, and those that the browser answers itself."""
    asked = 0
    for output, callback in target.app.callback_map.items():
        calm = calm_call(output, callback)
        for group in ("inputs", "state"):
            for index in range(len(calm[group])):
                for value in VALUES:
                    entries = [dict(entry) for entry in calm[group]]
                    entries[index]["value"] = value
                    assert target.call(calm | {group: entries}) in (200, 204, 400), (output, entries[index])
                    asked += 1
    assert asked > 300
    for body in (b'{"output": NaN}', b'{"output": "plan-body.children", "inputs": [Infinity]}', b"[" * 10_000, b"\x00"):
        assert target.call(body) == 400


PARTS = ("measured", "simulated", "stage", "ops", "whatif:schedule=x", "..", "<script>", "%00", "a" * 500, "\ud83d")
NUMBERS = ("0", "2", "-1", "62", "9" * 30)
OPTIONS = ("schedule=zb-h1&q=%ff", "schedule=%3Cscript%3E", "microbatches=1e308&step=9e9", "chunks=nan", "split=1,,-2")


def test_no_part_of_an_address_makes_the_server_fail(target: Target) -> None:
    """Every route with hostile texts and numbers in each place, and with hostile options."""
    data = json.loads(target.know("/timeline-data/about")[1])["token"]
    asked = 0
    for rule in (entry.rule for entry in target.app.server.url_map.iter_rules()):
        places = re.findall(r"<(?:([^<>]*):)?(\w+)>", rule)
        calm = {name: data if name == "token" else "0" if kind.startswith("int") else "stage" for kind, name in places}
        hostile = [
            calm | {name: quote(text, errors="surrogatepass")}
            for name, value in calm.items()
            for text in (NUMBERS if value == "0" else PARTS)
        ]
        tries = [(parts, "") for parts in hostile] + [(calm, f"?{option}") for option in OPTIONS]
        for parts, options in tries:
            path = re.sub(r"<(?:[^<>]*:)?(\w+)>", lambda place, parts=parts: parts[place[1]], rule) + options
            assert target.know(path)[0] in (200, 400, 404, 405, 409), path
            asked += 1
    assert asked > 300


def test_pages_may_run_the_dashboards_own_scripts_alone_and_none_may_frame_them_or_guess_types(target: Target) -> None:
    _, headers, page = target.ask("/", Authorization=f"Bearer {SECRET}")
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == policy["form-action"] == "'self'"
    scripts = policy["script-src"].split()
    assert scripts[0] == "'self'"
    assert all(source.startswith("'sha256-") for source in scripts[1:])
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", page), "nothing is loaded from elsewhere"
    for path in ("/", "/export/report.html", "/assets/style.css", "/timeline-data/about", "/nowhere.csv?token=x"):
        _, headers, _ = target.ask(path)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert (headers["X-Content-Type-Options"], headers["X-Frame-Options"]) == ("nosniff", "DENY")
