"""The web server of the dashboard, and opening a browser."""

from __future__ import annotations

import atexit
import ipaddress
import logging
import os
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Callable
from typing import Any

from waitress import wasyncore
from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser
from waitress.server import create_server

from dashboards.guard import MOST_REQUEST_BYTES
from pptrace.errors import PptraceError, UsageError

_HIGHEST_PORT = 65_535
_MOST_HEADER_BYTES = 2**16
_THREADS = 16
_MOST_CONNECTIONS = 400
_IDLE_S = 60
"""Seconds after which a connection is closed that sends nothing, or not the whole of its request."""
_HEADER_S = 10
"""Seconds that the header of a request may take."""
_ENDS_S = 0.5
"""Time that requests under way have when the server ends, s."""
_EVERY = ("0.0.0.0", "::")


class Server:
    """A server on a bound socket: one thread reads and writes all connections, others answer what is complete.

    A client that is slow, or sends more than it may, keeps no thread busy. Where connections are as many as there may be, that
    which has waited longest for its next request goes, so that somebody else is answered.
    """

    def __init__(self, app: Any, listener: socket.socket) -> None:
        logging.getLogger("waitress").setLevel(logging.ERROR)  # not each request that has to wait
        self._connections: dict[int, Any] = {}
        self._server = create_server(
            app,
            map=self._connections,
            sockets=[listener],
            threads=_THREADS,
            connection_limit=_MOST_CONNECTIONS,
            channel_timeout=_IDLE_S,
            max_request_header_size=_MOST_HEADER_BYTES,
            max_request_body_size=MOST_REQUEST_BYTES,
            clear_untrusted_proxy_headers=True,
            asyncore_use_poll=True,  # select takes no more than 1,024 files
            ident=None,
        )
        self._server.channel_class = _Channel
        self._is_ending = False
        self.was_interrupted = False

    def run(self) -> None:
        """Answer until Ctrl-C, or until another thread calls ``end``."""
        try:
            while not self._is_ending:
                self._close_idle()
                wasyncore.loop(timeout=1, use_poll=True, map=self._connections, count=1)
        except KeyboardInterrupt:
            self.was_interrupted = True
        finally:
            self._server.task_dispatcher.shutdown(timeout=_ENDS_S)
            wasyncore.close_all(self._connections)

    def end(self) -> None:
        """Let ``run`` return."""
        self._is_ending = True
        self._server.pull_trigger()

    def _close_idle(self) -> None:
        """Close connections whose request takes too long to come, and the oldest idle ones where there are too many."""
        idle = [channel for channel in self._server.active_channels.values() if not channel.requests]
        now_s = time.time()  # the clock of the channels' last_activity
        num_over = len(self._connections) + 1 - _MOST_CONNECTIONS
        oldest = sorted(idle, key=_Channel.idle_since_s)[: max(num_over, 0)]
        for channel in {*oldest, *(channel for channel in idle if channel.is_late(now_s))}:
            channel.handle_close()


class _Request(HTTPRequestParser):  # type: ignore[misc]  # waitress has no types
    """A request that comes in, with the time of its first byte."""

    def __init__(self, adj: Any) -> None:
        super().__init__(adj)
        self.begun_s = time.time()


class _Channel(HTTPChannel):  # type: ignore[misc]
    """A connection that knows since when it waits for the rest of a request."""

    parser_class = _Request

    def idle_since_s(self) -> float:
        request = self.request
        return float(self.last_activity if request is None else request.begun_s)

    def is_late(self, now_s: float) -> bool:
        request = self.request
        if request is None:
            return False
        return bool(now_s - request.begun_s > (_IDLE_S if request.headers_finished else _HEADER_S))


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


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}/"


def reach_of(listener: socket.socket, has_secret: bool) -> str:
    """A warning where others than this machine's own programs can ask; "" where none can."""
    host = listener.getsockname()[0]
    if ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        return ""
    where = f"warning: --host: everybody who reaches {'this machine' if host in _EVERY else host} over the network"
    if has_secret:
        return (
            f"{where} and knows the token can read these traces; it is not encrypted: in a network of others use ssh -L"
        )
    return f"{where} can read these traces; protect them with --token auto, or use ssh -L without --host"


def serve(app: Any, listener: socket.socket) -> None:
    """Answer until Ctrl-C, which ends the process quietly.

    Threads may still read or analyse. Python would end them when they come back from native code, by unwinding it, which aborts
    the process where that is C++ (numpy's unique): so what is to be done at exit is done, and the process left.
    """
    server = Server(app.server, listener)
    server.run()
    if server.was_interrupted:
        sys.stdout.flush()
        atexit._run_exitfuncs()
        os._exit(0)


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
