"""One rank of ``pptrace run``, as a process.

    python -m instrument.launch.rank (SCRIPT | -m MODULE) [ARGS]…

Torch's launcher sets RANK and the like; ``pptrace run`` adds what :class:`instrument.launch.worker.WorkerConfig` reads.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import MutableMapping

from instrument.launch.spawned import record_as_rank
from instrument.launch.worker import Rank, WorkerConfig


def _with_a_port_of_its_own(environ: MutableMapping[str, str]) -> None:
    """Let the script itself hold the store of a group of one, as without a launcher.

    Ranks that it starts by itself, or a port that it chooses, would else look for the launcher's store there, and wait for ever.
    """
    if environ.get("WORLD_SIZE") == "1" and environ.pop("TORCHELASTIC_USE_AGENT_STORE", None) is not None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            environ["MASTER_PORT"] = str(free.getsockname()[1])


def main() -> None:
    environ = os.environ
    _with_a_port_of_its_own(environ)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    rank = Rank(
        WorkerConfig.from_environ(environ),
        int(environ["RANK"]),
        int(environ["LOCAL_RANK"]),
        int(environ["WORLD_SIZE"]),
        record_started=record_as_rank,
    )
    sys.exit(rank.run(sys.argv[1:]))


if __name__ == "__main__":
    main()
