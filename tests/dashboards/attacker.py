"""Asks a dashboard on a port as an attacker does: paths as they are, headers of any kind, bytes that are no request."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dashboards.serve import Server, bind

SECRET = "only-who-knows-this"
CALLBACK = "/_dash-update-component"
OVERVIEW: dict[str, Any] = {
    "output": "overview-body.children",
    "outputs": {"id": "overview-body", "property": "children"},
    "inputs": [{"id": "step", "property": "value", "value": 2}],
    "changedPropIds": ["step.value"],
}
PRIVATE = "private-words-of-another-file"
ANSWERS_S = 60


class Target:
    """A dashboard that answers on a port, and what it was made of."""

    def __init__(self, port: int, app: Any) -> None:
        self.port, self.app, self.host = port, app, f"127.0.0.1:{port}"

    def ask(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, http.client.HTTPMessage, str]:
        """(status, headers, text) of one request, whose path is sent as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWERS_S)
        try:
            connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            for name, value in sent.items() | ({("Content-Length", str(len(body)))} if body is not None else set()):
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read().decode("utf-8", "replace")
        finally:
            connection.close()

    def know(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, str]:
        """(status, text) of a request that knows the secret."""
        status, _, text = self.ask(path, method, body, Authorization=f"Bearer {SECRET}", **headers)
        return status, text

    def call(self, body: Mapping[str, Any] | bytes) -> int:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.know(CALLBACK, "POST", content, Content_Type="application/json")[0]

    def raw(self, content: bytes) -> bytes:
        """The answer to bytes that need not be a request; the server closes or answers with a length."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=ANSWERS_S) as connection:
            connection.sendall(content)
            return connection.recv(65_536)


@contextmanager
def serving(app: Any, port: int = 0) -> Iterator[socket.socket]:
    """Serve a WSGI app on a port, or on one of its own."""
    with bind("127.0.0.1", port) as listener:
        server = Server(app, listener)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        yield listener
        server.end()
        thread.join(10)
        assert not thread.is_alive()


@contextmanager
def attacked(app: Any, port: int = 0) -> Iterator[Target]:
    """Serve a dashboard."""
    with serving(app.server, port) as listener:
        yield Target(listener.getsockname()[1], app)
