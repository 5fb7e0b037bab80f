"""The web server of the dashboard, and opening a browser."""

from __future__ import annotations

import os
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from pptrace.errors import PptraceError, UsageError

_HIGHEST_PORT = 65_535


class _Quiet(WSGIRequestHandler):
    """A request handler that logs errors alone."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log no request that was answered."""


def bind(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 takes a free one.

    Raises:
        UsageError: the port is no port.
        PptraceError: the address cannot be listened on.
    """
    if not 0 <= port <= _HIGHEST_PORT:
        raise UsageError(f"--port {port}: expected 0 to {_HIGHEST_PORT}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as err:
        raise PptraceError(f"--host {host}: no such address ({err.strerror}); expected one of this machine") from None
    try:
        if sys.platform != "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as err:
        listener.close()
        reason = err.strerror or str(err)
        raise PptraceError(
            f"cannot listen on {host}:{port} ({reason}); choose another with --port, or --port 0"
        ) from None
    return listener


def make(app: Any, listener: socket.socket) -> BaseWSGIServer:
    """A server for a Dash app on a bound socket, one thread per request."""
    host, port = listener.getsockname()[:2]
    return make_server(host, port, app.server, threaded=True, request_handler=_Quiet, fd=listener.fileno())


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}/"


def serve(app: Any, listener: socket.socket) -> None:
    """Answer until Ctrl-C, which ends this quietly."""
    with suppress(KeyboardInterrupt), make(app, listener) as server:
        server.serve_forever()


def open_browser(url: str, opener: Callable[[str], bool] = webbrowser.open) -> threading.Thread | None:
    """Show the page where there is a screen, in a separate thread; None where there is no screen."""
    has_screen = sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    )
    if not has_screen:
        return None
    thread = threading.Thread(target=opener, args=(url,), daemon=True)
    thread.start()
    return thread
