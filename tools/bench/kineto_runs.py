"""Synthetic Kineto traces of any number of ops, written as they are made: a simulated step again and again, at other times.

Three styles, of the same run of interleaved 1F1B:

    marks    the runtime's own ranges: ops, messages with their waits, the optimizer
    labels   the ranges of torch.distributed.pipelining on the host, and the profiler's ranges of steps
    nccl     these labels with the kernels of each op, and of each message all that torch records of a call of NCCL: the operator,
             ``record_param_comms`` with its arguments, the range of the process group, the launch, the kernel and its range
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pptrace.marks import OpMark, P2PMark, SpanMark, Transfer, parse_mark
from pptrace.schedule.registry import build
from pptrace.simulator import simulate
from tests.dashboards.synthetic import GAP_NS, costs_of_step, facts_of_plan, step_events, write_run_json

Event = Mapping[str, Any]

_STEP = 987_654_321
"""Stands for the number of the step in the names of the one that is simulated."""
_HOLE = '"@"'
_POSTING_US = 20.0  # that a call takes on the host to post a message
_WARPED = 7  # steps of different speeds


def write_kineto_run(folder: Path, style: str, pp: int, num_microbatches: int, num_steps: int, num_chunks: int) -> None:
    """Write a run directory: one trace per rank and run.json; the steps differ in speed."""
    plan = build("interleaved-1f1b", pp, num_microbatches, num_chunks)
    simulation = simulate(plan, costs_of_step(plan, 2))
    facts = facts_of_plan(plan)
    for rank in range(pp):
        events = list(STYLES[style](step_events(simulation, rank, _STEP, 0), rank))
        step = _Step.of(events, simulation.makespan_ns + GAP_NS)
        head = {"schemaVersion": 1, "baseTimeNanoseconds": 1_700_000_000_000_000_000}
        if style == "marks":
            head["pptrace"] = facts | {"rank": rank}
        else:
            head["distributedInfo"] = _job(rank, pp, style)
        with gzip.open(folder / f"rank{rank}.json.gz", "wt", compresslevel=1, encoding="utf-8") as file:
            file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
            for number in range(num_steps):
                file.write((",\n" if number else "") + step.text(number))
            file.write("\n]}\n")
    write_run_json(folder, pp)


def _job(rank: int, pp: int, style: str) -> dict[str, Any]:
    job: dict[str, Any] = {"rank": rank, "world_size": pp}
    if style == "nccl":
        group = {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "pg_size": pp}
        job |= {"backend": "nccl", "pg_count": 1, "pg_config": [group | {"ranks": list(range(pp))}]}
    return job


@dataclass(frozen=True, slots=True)
class _Step:
    """The events of a step as text in pieces, and what stands between them: starts and ends, ns from the beginning of the step,
    and correlation ids, −1 where an event has none.
    """

    pieces: Sequence[str]
    start_ns: npt.NDArray[np.int64]
    end_ns: npt.NDArray[np.int64]
    correlation: npt.NDArray[np.int64]
    length_ns: int

    @classmethod
    def of(cls, events: Sequence[Event], length_ns: int) -> _Step:
        holes = []
        for event in events:
            args = dict(event.get("args", {}))
            if "correlation" in args:
                args["correlation"] = "@"
            holes.append({**event, "args": args, "ts": "@", "dur": "@"})
        starts = np.array([event["ts"] for event in events])
        ends = starts + [event["dur"] for event in events]
        return cls(
            ",\n".join(map(json.dumps, holes)).split(_HOLE),
            *(np.round(times * 1000).astype(np.int64) for times in (starts, ends)),
            np.array([event.get("args", {}).get("correlation", -1) for event in events]),
            length_ns,
        )

    def text(self, number: int) -> str:
        """The events of the step of this number: every seventh step is as fast as the first, those between are slower."""
        hundredths = 100 + 2 * (number % _WARPED)
        cycle = sum(100 + 2 * index for index in range(_WARPED))
        begun = number // _WARPED * cycle + sum(100 + 2 * index for index in range(number % _WARPED))
        start, end = self.start_ns * hundredths // 100, self.end_ns * hundredths // 100
        columns = (start + begun * self.length_ns // 100, end - start, self.correlation)
        numbers: list[str] = []
        shift = number * (int(self.correlation.max(initial=-1)) + 1) + 1
        for start_ns, dur_ns, correlation in zip(*(column.tolist() for column in columns), strict=True):
            if correlation >= 0:
                numbers.append(str(correlation + shift))
            numbers.append(f"{start_ns // 1000}.{start_ns % 1000:03d}")
            numbers.append(f"{dur_ns // 1000}.{dur_ns % 1000:03d}")
        filled = [part for pair in zip(self.pieces, numbers, strict=False) for part in pair]
        return "".join([*filled, self.pieces[-1]]).replace(str(_STEP), str(2 + number))


def _marks(events: Sequence[Event], rank: int) -> Iterator[Event]:
    yield from events


def _labels(events: Sequence[Event], rank: int) -> Iterator[Event]:
    """Ops and messages under the names that torch.distributed.pipelining writes, and the profiler's range of the step."""
    kept = []
    for event in events:
        match parse_mark(event["name"]):
            case OpMark(action):
                kept.append({**event, "name": f"PP:{action}"})
            case P2PMark((transfer,)):
                kept.append({**event, "name": f"PP:{transfer.action}"})
            case SpanMark():
                kept.append({**event, "name": "Optimizer.step#AdamW.step"})
    yield from kept
    start, end = min(event["ts"] for event in kept), max(event["ts"] + event["dur"] for event in kept)
    yield _event("user_annotation", f"ProfilerStep#{_STEP}", start - 5, end + 5)


def _nccl(events: Sequence[Event], rank: int) -> Iterator[Event]:
    """The labels, with the launches and kernels of ops and messages; a message's label is its posting."""
    correlation, posted = 0, 0.0
    for event in sorted(events, key=lambda event: float(event["ts"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        match parse_mark(event["name"]):
            case OpMark():
                for part in range(2):
                    middle = (start + end) / 2
                    times = (start + 5, middle - 5) if part == 0 else (middle, end - 5)
                    yield from _launched("void gemm_kernel(float*)", correlation, start + 1 + part, *times, stream=7)
                    correlation += 1
            case P2PMark((transfer,)):
                start = max(start, posted)  # the thread posts one message after the other
                posted = start + _POSTING_US
                yield from _message(transfer, rank, correlation, start, max(end, posted))
                correlation += 1
    for event in _labels(events, rank):
        is_message = event["name"].startswith("PP:") and ("SEND" in event["name"] or "RECV" in event["name"])
        yield {**event, "dur": _POSTING_US} if is_message else event


def _message(transfer: Transfer, rank: int, correlation: int, start: float, end: float) -> Iterator[Event]:
    """All events of one message: on the host while it is posted, on the device until it has arrived."""
    is_send = transfer.action.kind.is_send
    kind, edge = ("send", "->") if is_send else ("recv", "<-")
    name = f"nccl:{kind} {rank}{edge}{transfer.peer}"
    args = {
        "Collective name": kind,
        "In msg nelems": transfer.bytes // 4,
        "Out msg nelems": transfer.bytes // 4,
        "Group size": 8,
        "dtype": "Float",
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
        "Dst Rank" if is_send else "Src Rank": transfer.peer,
    }
    operator = "c10d::send" if is_send else "c10d::recv_"
    yield _event("cpu_op", operator, start + 2, start + 18)
    yield _event("cpu_op", "record_param_comms", start + 3, start + 17, args=args)
    yield _event("user_annotation", name, start + 4, start + 16)
    kernel = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    stream = 20 if is_send else 24
    yield from _launched(kernel, correlation, start + 8, start + 12, end, stream, args)
    yield {**_event("gpu_user_annotation", name, start + 12, end), "tid": stream}


def _launched(
    kernel: str, correlation: int, launch: float, start: float, end: float, stream: int, args: Event | None = None
) -> Iterator[Event]:
    yield _event("cuda_runtime", "cudaLaunchKernelExC", launch, launch + 0.5, args={"correlation": correlation})
    placed = {"device": 0, "stream": stream, "correlation": correlation}
    yield {**_event("kernel", kernel, start, end, args={**(args or {}), **placed}), "tid": stream}


def _event(category: str, name: str, start: float, end: float, args: Event | None = None) -> Event:
    """An event of the main thread; times in µs."""
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "args": dict(args or {}), **times}


STYLES: Mapping[str, Callable[[Sequence[Event], int], Iterator[Event]]] = {
    "marks": _marks,
    "labels": _labels,
    "nccl": _nccl,
}
