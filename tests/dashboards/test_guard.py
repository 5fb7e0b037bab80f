"""Attacks on the server: other names for this machine, other origins, what is no callback, paths, and large requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dashboards.app import create_app
from dashboards.guard import MOST_REQUEST_BYTES
from tests.dashboards.attacker import CALLBACK, OVERVIEW

HERE = {"Host": "127.0.0.1:8050"}


@pytest.fixture(scope="module")
def client(run_p4: Path) -> Any:
    return create_app([run_p4], ["my.host"]).server.test_client()


@pytest.mark.parametrize("host", ["127.0.0.1:8050", "localhost:1", "[::1]:8050", "my.host:8050", "192.168.1.7"])
def test_the_machines_own_names_are_answered(host: str, client: Any) -> None:
    assert client.get("/_dash-layout", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.com", "evil.com:8050", "127.0.0.1.evil.com", "localhost.evil.com", "[::1", "x@localhost.c", "\xff"]
)
@pytest.mark.parametrize("path", ["/", "/_dash-layout", "/timeline-data/about", "/assets/style.css"])
def test_a_name_that_anothers_dns_gives_to_this_machine_is_refused(host: str, path: str, client: Any) -> None:
    assert client.get(path, headers={"Host": host}).status_code in (400, 403)


@pytest.mark.parametrize(
    "host",
    [
        *("localhost:80:80", "localhost:", "localhost:x", "localhost:123456", "x@localhost", "localhost,localhost"),
        *("[::1", "[", "[::1]:x", "a:b:c", ""),
    ],
)
def test_a_malformed_host_is_a_bad_request(host: str, client: Any) -> None:
    assert client.get("/_dash-layout", headers={"Host": host}).status_code == 400


@pytest.mark.parametrize(
    "origin",
    [
        *("http://evil.com", "null", "http://127.0.0.1:9999", "http://127.0.0.1:8050.evil.com", "http://[::1", "//"),
        *("https://127.0.0.1:8050", "file://127.0.0.1:8050", "//127.0.0.1:8050", "http://x@127.0.0.1:8050", "\xff"),
        *("http://127.0.0.1:8050/", "http://127.0.0.1"),
    ],
)
def test_a_page_of_another_origin_is_refused(origin: str, client: Any) -> None:
    headers = {**HERE, "Origin": origin}
    assert client.post(CALLBACK, json=OVERVIEW, headers=headers).status_code == 403
    assert client.get("/timeline-data/about", headers=headers).status_code == 403
    assert client.post(CALLBACK, json=OVERVIEW, headers={**HERE, "Origin": "http://127.0.0.1:8050"}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"\xff\xfe", b"[]", b"5", b"[" * 100_000, b"{}"),
        *(
            json.dumps({**OVERVIEW, **change}).encode()
            for change in (
                {"output": "no-such.children"},
                {"output": ["overview-body.children"]},
                {"outputs": None},
                {"outputs": {"id": 3, "property": "children"}},
                {"inputs": None},
                {"inputs": []},
                {"inputs": [5]},
                {"inputs": [{"id": "step", "property": "value", "value": "<script>"}]},
                {"inputs": [{"id": "step", "property": "value", "value": {"a": 1}}]},
                {"inputs": [{"id": "other", "property": "value", "value": 2}]},
                {"state": "x"},
                {"changedPropIds": [5]},
            )
        ),
    ],
)
def test_what_is_no_callback_is_a_bad_request(body: bytes, client: Any) -> None:
    assert client.post(CALLBACK, data=body, content_type="application/json", headers=HERE).status_code == 400
    assert client.post(CALLBACK, json=OVERVIEW, headers=HERE).status_code == 200


def test_a_large_request_is_not_read(client: Any) -> None:
    body = b'"' + b"a" * MOST_REQUEST_BYTES + b'"'
    assert client.post(CALLBACK, data=body, content_type="application/json", headers=HERE).status_code == 413


@pytest.mark.parametrize(
    "rest",
    [
        "tile/{t}/planned/99/stage/0/20/0",
        "tile/{t}/other/2/stage/0/20/0",
        "tile/{t}/measured/2/height/0/20/0",
        "tile/{t}/measured/2/stage/7/20/0",
        "tile/{t}/measured/2/stage/0/63/0",
        "tile/{t}/measured/2/stage/0/50/99999999999999",
        "tile/{t}/measured/2/stage/0/20/" + "9" * 400,
        "tile/{t}/measured/2/stage/-1/20/0",
        "groups/{t}/measured/2/height/20/0",
        "bar/{t}/measured/2/ops/999999999",
        "bar/{t}/measured/2/..%2f..%2fetc/0",
        "bar/{t}/../2/ops/0",
    ],
)
def test_what_is_not_there_is_not_found(rest: str, client: Any) -> None:
    token = client.get("/timeline-data/about", headers=HERE).json["token"]
    answer = client.get("/timeline-data/" + rest.format(t=token), headers=HERE)
    is_page = answer.status_code == 200 and answer.mimetype == "text/html"  # an address of no route is the app's page
    assert answer.status_code == 404 or is_page
    assert str(Path.cwd()).encode() not in answer.data


def test_data_of_other_files_is_refused(client: Any) -> None:
    assert client.get("/timeline-data/tile/0123/measured/2/stage/0/20/0", headers=HERE).status_code == 409
    assert client.get("/timeline-data/find/0123?q=F", headers=HERE).status_code == 409
