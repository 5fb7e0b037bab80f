"""The secret that protects a dashboard: as a query once, then as a cookie, or as ``Authorization: Bearer``.

query  = ?token=SECRET             answered with the cookie, and with the same address without the secret
cookie = pptrace-NAME=PROOF.START  NAME and PROOF are digests of the secret, so that two dashboards of one machine have
                                   different cookies, and one that is started again with its secret keeps those that it gave;
                                   START is the server's own, so that nobody's guesses keep out whom it has let in

After some wrong ones in any of these forms the address that they come from waits, for longer each time.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import threading
from collections import OrderedDict
from hashlib import sha256
from html import escape
from math import ceil
from time import monotonic
from urllib.parse import quote, urlencode

from flask import Request, Response

from dashboards.policy import text_page
from pptrace.errors import UsageError
from pptrace.model.wording import counted

MOST_WRONG = 10
"""Wrong secrets of an address within a minute that cost nothing."""
MOST_WAIT_S = 10
"""The longest time for which an address waits: who knows the secret may share it with who guesses."""
_WITHIN_S = 60.0
_MOST_ADDRESSES = 1_000
_IPV6_BITS = 64
"""Bits of an IPv6 address that its owner does not choose."""


_NO_GUESSES: tuple[list[float], float] = ([], 0.0)


class Guesses:
    """Counts of wrong secrets. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._guessers: OrderedDict[str, tuple[list[float], float]] = OrderedDict()
        """Times of the last wrong secrets of each address, and the time until which it waits, s."""

    def wait_s(self, address: str | None) -> int:
        """Seconds for which no secret of this address is looked at; 0 where it is."""
        with self._lock:
            _, until_s = self._guessers.get(_network(address), _NO_GUESSES)
            return max(0, ceil(until_s - monotonic()))

    def count(self, address: str | None) -> None:
        """Count a wrong secret of this address."""
        now_s, network = monotonic(), _network(address)
        with self._lock:
            before_s, until_s = self._guessers.pop(network, _NO_GUESSES)
            wrong_s = [*(at_s for at_s in before_s if now_s - at_s < _WITHIN_S), now_s][-2 * MOST_WRONG :]
            if (num_more := len(wrong_s) - MOST_WRONG) >= 0:
                until_s = now_s + min(2**num_more, MOST_WAIT_S)
            self._guessers[network] = wrong_s, until_s
            while len(self._guessers) > _MOST_ADDRESSES:
                self._guessers.popitem(last=False)


def _network(address: str | None) -> str:
    """The part of an address that its owner does not choose."""
    try:
        known = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return ""
    if isinstance(known, ipaddress.IPv4Address):
        return str(known)
    return str(known.ipv4_mapped or ipaddress.ip_network((int(known), _IPV6_BITS), strict=False))


QUERY = "token"
LEAST_CHARACTERS = 12
AUTOMATIC = "auto"
_ENTER = """<h1>This dashboard is protected</h1>
<p>Open it with the address that the terminal shows, or enter its token.{wrong}</p>
<form method="get"><input type="password" name="token" aria-label="Token" autocomplete="off" required autofocus>
<button>Open</button></form>"""


def secret_of(option: str | None) -> str | None:
    """The secret of the option ``--token``: a random one for "auto", None where there is none.

    Raises:
        UsageError: it is too short, or holds what an address or a header cannot.
    """
    if option is None:
        return None
    if option == AUTOMATIC:
        return secrets.token_urlsafe(24)
    if len(option) < LEAST_CHARACTERS or not all("!" <= character <= "~" for character in option):
        raise UsageError(
            f"--token has {len(option)} characters; expected {LEAST_CHARACTERS} or more, letters, digits and signs; "
            "--token auto makes one"
        )
    return option


def address_with(url: str, secret: str | None) -> str:
    """The address that lets in whoever opens it."""
    return url if secret is None else f"{url}?{urlencode({QUERY: secret})}"


class Access:
    """The check of a secret. Every comparison takes the same time however much of it is right."""

    def __init__(self, secret: str) -> None:
        self._secret = _digest("secret", secret)
        self._proof = _digest("cookie", secret)
        self._start = secrets.token_hex(32)
        self._guesses = Guesses()
        self.cookie = f"pptrace-{_digest('name', secret)[:12]}"

    def refuse(self, request: Request) -> Response | None:
        """The answer to a request that has to prove itself first; None where it has."""
        given = request.args.getlist(QUERY)
        kind, _, bearer = request.headers.get("Authorization", "").partition(" ")
        cookie, _, start = request.cookies.get(self.cookie, "").partition(".")
        tried = [*given, *([bearer.strip()] if kind.lower() == "bearer" else ())]
        if (tried or cookie) and (wait_s := self._guesses.wait_s(request.remote_addr)):
            if self._has_proof(cookie) and hmac.compare_digest(_bytes(start), self._start.encode()):
                return None
            text = f"<h1>Too many wrong tokens</h1><p>Try again in {counted(wait_s, 'second')}.</p>"
            answer = text_page(text, 429)
            answer.headers["Retry-After"] = str(wait_s)
            return answer
        known = self._secret.encode()
        is_secret = [hmac.compare_digest(_digest("secret", text).encode(), known) for text in tried]
        if any(is_secret[: len(given)]):
            return self._enter(request)
        if self._has_proof(cookie) or any(is_secret):
            return None
        if tried or cookie:
            self._guesses.count(request.remote_addr)
        if not given and request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site"):
            # Who follows a link on another site has sent no strict cookie: the page asks for its own address again.
            return _leading_page(request, 401)
        wrong = " <strong>That was not the token.</strong>" if given else ""
        answer = text_page(_ENTER.format(wrong=wrong), 401)
        answer.headers["WWW-Authenticate"] = 'Bearer realm="pptrace"'
        return answer

    def _has_proof(self, cookie: str) -> bool:
        return hmac.compare_digest(_bytes(cookie), self._proof.encode())

    def _enter(self, request: Request) -> Response:
        """The cookie, on a page that leads to the address without the secret.

        It is no redirection: a browser that comes from a page of another site would follow one without the new cookie.
        """
        answer = _leading_page(request)
        answer.set_cookie(
            self.cookie,
            f"{self._proof}.{self._start}",
            httponly=True,
            samesite="Strict",
            path="/",
            secure=request.is_secure,
        )
        return answer


def _leading_page(request: Request, status: int = 200) -> Response:
    """A page that leads to the address without the secret, on this server alone."""
    left = [(name, value) for name, value in request.args.items(multi=True) if name != QUERY]
    target = escape("/" + quote(request.path.lstrip("/\\")) + (f"?{urlencode(left)}" if left else ""))
    body = f'<h1>pptrace</h1><p><a href="{target}">Open the dashboard</a></p>'
    return text_page(body, status, head=f'<meta http-equiv="refresh" content="0;url={target}">')


def _digest(purpose: str, secret: str) -> str:
    return hmac.new(_bytes(secret), f"pptrace {purpose}".encode(), sha256).hexdigest()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
