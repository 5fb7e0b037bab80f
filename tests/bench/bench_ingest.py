"""How fast ``read_kineto`` reads a large trace, beside decoders that stop at Python objects, in one run.

    python tests/bench/bench_ingest.py [TRACE] [--megabytes N] [--rounds N]

TRACE (default: a small made-up one) is replicated, its times shifted, until the file is large enough. Each reader runs in a
process of its own, in turns; the best of N rounds. MB are 10^6 bytes of JSON text, also for the gzip file; memory is the
growth of the process's peak.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import multiprocessing
import re
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pptrace.ingest import read_kineto

_TIME = re.compile(rb'("ts": ?)(\d+)')
_SHIFT_US = 10_000_000


def _read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def _read_msgspec(path: Path) -> Any:
    import msgspec

    return msgspec.json.decode(path.read_bytes())


def _read_orjson(path: Path) -> Any:
    import orjson  # type: ignore[import-not-found,unused-ignore]

    return orjson.loads(path.read_bytes())


def _peak_bytes() -> int:
    """Of this process since it began; what ``getrusage`` says would include the parent's on Linux."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else 0


def _measure(reader: Callable[[Path], Any], path: Path, answer: Connection) -> None:
    before = _peak_bytes()
    begin = time.perf_counter()
    result = reader(path)
    seconds = time.perf_counter() - begin
    answer.send((seconds, _peak_bytes() - before))
    answer.close()
    del result


def _measure_in_process(reader: Callable[[Path], Any], path: Path) -> tuple[float, int]:
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(reader, path, send))
    process.start()
    seconds, memory = receive.recv()
    process.join()
    return seconds, memory


def _sample() -> bytes:
    """A trace in Kineto's layout: host ops, launches, kernels and flows."""
    events: list[dict[str, Any]] = []
    for index in range(2000):
        ts = 4458676522690.655 + index * 20
        shapes = {
            "External id": index,
            "Record function id": 0,
            "Input Dims": [[64, 1024], [1024, 4096]],
            "Ev Idx": index,
        }
        device = {
            "device": 0,
            "context": 1,
            "stream": 7,
            "correlation": index,
            "grid": [512, 1, 1],
            "block": [128, 1, 1],
        }
        common = {"pid": 2910249, "tid": 2919752, "ts": ts, "dur": 12.345}
        events += [
            {"ph": "X", "cat": "cpu_op", "name": "aten::addmm", **common, "args": shapes},
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                **common,
                "args": {"cbid": 211, "correlation": index},
            },
            {"ph": "s", "id": index, **common, "cat": "ac2g", "name": "ac2g"},
            {"ph": "X", "cat": "kernel", "name": "ampere_sgemm_128x64_tn", **common, "args": device},
        ]
    body = ",\n  ".join(re.sub(r"\n", "\n  ", json.dumps(event, indent=2)) for event in events)
    return ('{\n  "schemaVersion": 1,\n  "traceEvents": [\n  ' + body + '\n  ],\n  "traceName": "sample"\n}\n').encode()


def replicate(text: bytes, num_bytes: int) -> bytes:
    """The trace over and over with later and later times, until it is at least this long."""
    begin = text.index(b"{", text.index(b'"traceEvents"'))
    end = text.rindex(b"\n  ]") if b"\n  ]" in text else text.rindex(b"]")
    events = text[begin:end].rstrip()
    copies = [events]
    while sum(map(len, copies)) < num_bytes:
        shift = len(copies) * _SHIFT_US
        copies.append(_TIME.sub(lambda match, by=shift: match[1] + b"%d" % (int(match[2]) + by), events))  # type: ignore[misc]
    return text[:begin] + b",\n  ".join(copies) + text[end:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    text = options.trace.read_bytes() if options.trace else _sample()
    text = gzip.decompress(text) if text.startswith(b"\x1f\x8b") else text
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = Path(folder) / "large.json", Path(folder) / "large.json.gz"
        plain.write_bytes(replicate(text, options.megabytes * 10**6))
        packed.write_bytes(gzip.compress(plain.read_bytes(), 1))
        readers: list[tuple[str, Callable[[Path], Any], Path]] = [
            ("read_kineto", read_kineto, plain),
            ("read_kineto, gzip", read_kineto, packed),
            ("msgspec untyped", _read_msgspec, plain),
            ("json.loads", _read_json, plain),
        ]
        if importlib.util.find_spec("orjson"):
            readers.append(("orjson.loads", _read_orjson, plain))
        size = plain.stat().st_size
        print(f"{size / 1e6:.0f} MB of JSON, {packed.stat().st_size / 1e6:.0f} MB of gzip, best of {options.rounds}")
        results: dict[str, list[tuple[float, int]]] = {name: [] for name, _, _ in readers}
        for _ in range(options.rounds):  # in turns, so that other load on the machine meets all alike
            for name, reader, path in readers:
                results[name].append(_measure_in_process(reader, path))
        own = min(results["read_kineto"])[0]
        for name, measured in results.items():
            seconds, memory = min(measured)
            speed = f"{seconds:6.2f} s {size / seconds / 1e6:6.0f} MB/s  {memory / size:5.2f} bytes per byte"
            print(f"{name:18} {speed}  {seconds / own:5.2f} × read_kineto's time")


if __name__ == "__main__":
    main()
