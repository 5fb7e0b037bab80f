"""The secret of a dashboard that runs: who has it, who guesses, and what becomes of it in an address."""

from __future__ import annotations

import hmac
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import dashboards.access
from dashboards.access import Access, Guesses, secret_of
from dashboards.app import create_app
from dashboards.serve import bind, reach_of
from pptrace.errors import UsageError
from tests.dashboards.attacker import CALLBACK, OVERVIEW, SECRET, Target


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let everybody guess."""
    monkeypatch.setattr(Guesses, "count", lambda *_: None)


def addresses_of(app: Any) -> list[str]:
    """An address for every route that is answered with GET."""
    rules = [rule for rule in app.server.url_map.iter_rules() if "GET" in rule.methods]
    return [re.sub(r"<[^>]*int[^>]*>", "0", rule.rule).replace("<name>", "steps.csv") for rule in rules]


def test_without_the_secret_no_address_is_answered(target: Target) -> None:
    addresses = [re.sub(r"<[^>]*>", "x", path) for path in addresses_of(target.app)]
    assert {"/_dash-layout", "/export/steps.csv", "/timeline-data/about", "/_favicon.ico"} <= set(addresses)
    for path in addresses:
        status, headers, text = target.ask(path)
        assert (status, headers["WWW-Authenticate"]) == (401, 'Bearer realm="pptrace"'), path
        assert "rank" not in text
    assert target.ask(CALLBACK, "POST", json.dumps(OVERVIEW).encode(), Content_Type="application/json")[0] == 401


@pytest.mark.parametrize(
    "guess", ["", SECRET[:-1], SECRET + "x", SECRET.upper(), "%00", "é" * 8, "*", " " + SECRET[1:]]
)
def test_what_is_not_the_secret_opens_nothing(guess: str, target: Target, patient: None) -> None:
    assert target.ask(f"/_dash-layout?token={quote(guess)}")[0] == 401
    header = guess.encode().decode("latin-1")
    assert target.ask("/_dash-layout", Authorization=f"Bearer {header}")[0] == 401
    name = Access(SECRET).cookie
    for cookie in (
        f"{name}={header}",
        f"{name}={SECRET}",
        f"{name}={Access('another-secret')._proof}",
        name,
        f"x={SECRET}",
    ):
        assert target.ask("/_dash-layout", Cookie=cookie)[0] == 401
    assert target.ask("/_dash-layout", Authorization=f"Basic {SECRET}")[0] == 401


def test_the_secret_in_an_address_becomes_a_cookie_that_no_script_reads(target: Target) -> None:
    status, headers, text = target.ask(f"/timeline?step=2&token={SECRET}&rows=1")
    cookie = headers["Set-Cookie"]
    assert status == 200
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert SECRET not in cookie + text
    assert 'content="0;url=/timeline?step=2&amp;rows=1"' in text, "the same address, without the secret"
    pair = cookie.split(";")[0]
    assert target.ask("/_dash-layout", Cookie=pair)[0] == 200
    body = json.dumps(OVERVIEW).encode()
    assert target.ask(CALLBACK, "POST", body, Cookie=f"a=b; {pair}", Content_Type="application/json")[0] == 200
    again = Access(SECRET)
    assert pair.partition(".")[0] == f"{again.cookie}={again._proof}", (
        "a dashboard that is started again knows whom it let in"
    )
    assert Access("another-secret").cookie != again.cookie, "two dashboards of one machine keep theirs apart"


@pytest.mark.parametrize(
    "path", ["//evil.com/", "/\\evil.com/", "///evil.com", "/%2fevil.com", '//evil.com"><script>/']
)
def test_the_way_in_leads_nowhere_else(path: str, target: Target) -> None:
    status, headers, text = target.ask(f"{path}?token={SECRET}")
    assert "Location" not in headers
    links = re.findall(r'(?:url=|href=")([^"]*)"', text)
    assert status in (200, 400, 404)
    assert all(re.match(r"/(?![/\\])", link) for link in links)
    assert "<script" not in text


def test_who_follows_a_link_on_another_site_is_asked_for_the_cookie_by_a_page_of_this_one(target: Target) -> None:
    """Browsers send a strict cookie with requests of this site alone: the first answer asks again, and the second decides."""
    visit = {"Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    status, headers, text = target.ask("//evil.com/x?rows=1", Sec_Fetch_Site="cross-site", **visit)
    assert (status, headers["Set-Cookie"]) == (401, None)
    assert 'content="0;url=/evil.com/x?rows=1"' in text
    status, _, text = target.ask("/evil.com/x?rows=1", Sec_Fetch_Site="same-origin", **visit)
    assert (status, "enter its token" in text, "refresh" in text) == (401, True, False)


def test_who_guesses_waits_and_nobody_else(run_p4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(dashboards.access, "monotonic", lambda: now_s)
    client = create_app([run_p4], secret=SECRET).server.test_client(use_cookies=False)

    def ask(address: str, **headers: str) -> tuple[int, str | None]:
        answer = client.get("/_dash-layout", headers=headers, environ_base={"REMOTE_ADDR": address})
        return answer.status_code, answer.headers.get("Retry-After")

    right, cookie = {"Authorization": f"Bearer {SECRET}"}, Access(SECRET).cookie
    entered = client.get(f"/?token={SECRET}").headers["Set-Cookie"].split(";")[0]
    wrong = [{"Authorization": "Bearer x"}, {"Cookie": f"{cookie}=x"}]
    assert [ask("10.0.0.1", **wrong[at % 2])[0] for at in range(11)] == [401] * 10 + [429]
    assert ask("10.0.0.1", **right) == (429, "1"), "nor does an answer tell which guess is right"
    assert ask("10.0.0.1", Cookie=entered)[0] == 200, "who has been let in stays"
    assert ask("10.0.0.1", Cookie=f"{cookie}={Access(SECRET)._proof}.x")[0] == 429
    assert ask("10.0.0.1")[0] == 401, "the page that asks for the token"
    assert ask("10.0.0.2", **right)[0] == 200, "others do not wait"
    waits_s = []
    for _ in range(6):
        now_s += float(ask("10.0.0.1", **wrong[0])[1] or 0)
        assert ask("10.0.0.1", **wrong[0])[0] == 401
        waits_s.append(ask("10.0.0.1", **wrong[0])[1])
    assert waits_s == ["2", "4", "8", "10", "10", "10"]
    now_s += 10
    assert ask("10.0.0.1", **right)[0] == 200


def test_a_network_guesses_as_one_and_the_memory_of_guessers_is_bounded() -> None:
    guesses = Guesses()
    for at in range(10):
        guesses.count(f"2001:db8::{at:x}")
    assert guesses.wait_s("2001:db8::ffff") == 1
    assert guesses.wait_s("2001:db8:0:1::1") == guesses.wait_s(None) == 0
    for at in range(1_000):
        guesses.count(f"10.0.{at // 250}.{at % 250}")
    assert guesses.wait_s("2001:db8::1") == 0


def test_every_comparison_with_the_secret_takes_constant_time(
    target: Target, monkeypatch: pytest.MonkeyPatch, patient: None
) -> None:
    """Digests of one length are compared by the function that looks at all of them, for callbacks too."""
    seen: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def count(one: bytes, other: bytes) -> bool:
        seen.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(dashboards.access.hmac, "compare_digest", count)
    assert target.call(OVERVIEW) == 200
    status, *_ = target.ask(
        CALLBACK, "POST", json.dumps(OVERVIEW).encode(), Authorization="Bearer o", Content_Type="application/json"
    )
    assert status == 401
    assert (64, 64) in seen
    assert all(other == 64 for _, other in seen)
    assert len(seen) == 4, "cookie and header of both requests"


@pytest.mark.parametrize(
    "option", ["short", "a" * 11, "with spaces in it", "über-geheimes-wort", "line\nline-line-line"]
)
def test_a_weak_token_is_refused(option: str) -> None:
    with pytest.raises(UsageError, match="--token"):
        secret_of(option)


def test_a_token_is_made_or_taken() -> None:
    assert secret_of(None) is None
    assert secret_of(SECRET) == SECRET
    made = {secret_of("auto") for _ in range(3)}
    assert len(made) == 3
    assert all(len(text or "") >= 32 for text in made)


def test_an_address_that_others_reach_is_warned_about() -> None:
    with bind("127.0.0.1", 0) as own, bind("0.0.0.0", 0) as every:
        assert reach_of(own, has_secret=False) == ""
        assert "--token" in reach_of(every, has_secret=False)
        assert "not encrypted" in reach_of(every, has_secret=True)
