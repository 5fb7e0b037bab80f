"""One rank's process: reads its program from stdin, runs a step for each further line, and prints when it began and ended.

It is started as a script, alone, so that it starts fast: standard library only.
"""

from __future__ import annotations

import json
import queue
import socket
import struct
import sys
import threading
import time
from typing import Any

_HEADER = struct.Struct("!qqqq")
"""Step, message (its number n, or −1 − n: its receive is posted), time of posting in ns, and how many bytes follow."""
_SPIN_NS = 150_000
"""The end of a sleep, ns, which is waited for in a loop: sleeps end late."""
_PART = 1 << 16


class Mailbox:
    """Notes of peers, by step, message and side."""

    def __init__(self) -> None:
        self._posted: dict[tuple[int, int], int] = {}
        self._changed = threading.Condition()

    def put(self, step: int, message: int, posted: int) -> None:
        with self._changed:
            self._posted[step, message] = posted
            self._changed.notify_all()

    def take(self, step: int, message: int) -> int:
        """Wait for a note, and return when its side was ready, ns."""
        with self._changed:
            while (step, message) not in self._posted:
                self._changed.wait()
            return self._posted.pop((step, message))


def read_from(peer: socket.socket, mailbox: Mailbox) -> None:
    """Take in all that a peer sends, until it goes."""
    with peer.makefile("rb") as stream:
        while len(header := stream.read(_HEADER.size)) == _HEADER.size:
            step, message, posted, size = _HEADER.unpack(header)
            while size:
                size -= len(stream.read(min(size, _PART)))
            mailbox.put(step, message, posted)


def wait_until(deadline: int) -> None:
    """Sleep until a time of the monotonic clock, ns."""
    while (left := deadline - time.monotonic_ns()) > 0:
        if left > _SPIN_NS:
            time.sleep((left - _SPIN_NS) / 1e9)


class Rank:
    """Program of a process, and its peers."""

    def __init__(self, setting: dict[str, Any]) -> None:
        self._program, self._messaging, self._prefetch = (
            setting[name] for name in ("program", "messaging", "prefetch")
        )
        self._payload = bytes(setting["message_bytes"])
        self._peers = {int(rank): socket.socket(fileno=number) for rank, number in setting["peers"].items()}
        self._mailbox, self._received = Mailbox(), Mailbox()
        self._posted: queue.SimpleQueue[tuple[int, list[list[Any]]]] = queue.SimpleQueue()
        threading.Thread(target=self._run_stream, daemon=True).start()
        for peer in self._peers.values():
            threading.Thread(target=read_from, args=(peer, self._mailbox), daemon=True).start()

    def run(self, step: int, at: int) -> tuple[int, int]:
        """Run a step from a time on. Returns (start of the first op, end of the last one), ns."""
        wait_until(at)
        began, ends = 0, [at] * (self._prefetch + 1)
        for what, value in self._program:
            if what == "op":
                now = time.monotonic_ns()
                began = began or now
                ends.append(now + value)
                wait_until(ends[-1])
            elif what == "reads":
                for message in value:
                    self._received.take(step, message)
            elif self._messaging == "in_order":
                self._posted.put((step, value))
            else:
                self._transfer(step, value, ends[-1 - self._prefetch])
        return began, ends[-1]

    def _run_stream(self) -> None:
        """Run what the rank posts, one call after the other, while it goes on."""
        while True:
            step, group = self._posted.get()
            self._transfer(step, group, 0)
            for message, _, is_send, _ in group:
                if not is_send:
                    self._received.put(step, message, 0)

    def _transfer(self, step: int, group: list[list[Any]], ready: int) -> None:
        """Exchange a group of messages; the receives of a rank that prefetches have been posted at ``ready``."""
        posted = time.monotonic_ns()
        meets = self._messaging in ("rendezvous", "one_call_at_a_time", "in_order")
        for message, peer, is_send, _ in group:
            if is_send:
                self._send(peer, step, message, posted, self._payload)
            elif meets:
                self._send(peer, step, -1 - message, posted, b"")
        through = posted
        for message, _, is_send, taken in group:
            if is_send and not meets:
                continue
            other = self._mailbox.take(step, -1 - message if is_send else message)
            begun = other if self._messaging == "ahead" else max(ready if self._prefetch else posted, other)
            through = max(through, begun + taken)
        wait_until(through)

    def _send(self, peer: int, step: int, message: int, posted: int, payload: bytes) -> None:
        self._peers[peer].sendall(_HEADER.pack(step, message, posted, len(payload)) + payload)


def main() -> None:
    """Run steps as stdin has them: first the setting, then for each step a line with its number and when to begin."""
    rank = Rank(json.loads(sys.stdin.readline()))
    print("ready", flush=True)
    for line in sys.stdin:
        step, at = map(int, line.split())
        print(*rank.run(step, at), flush=True)


if __name__ == "__main__":
    main()
