"""Traces without op labels: forwards and backwards of a pipeline found by the order of what its host thread does.

A pipeline's thread posts messages between its ops. What it computes from one message to the next is one op: a backward where
autograd's engine runs (in whatever thread), a forward otherwise. A send carries what the op before it made, a receive what
the op after it reads; the k-th forward of a step is that of microbatch k, and so is the k-th backward. That holds for every
schedule with one stage per rank (torch's Schedule1F1B, which has no labels). Steps are told by their optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from pptrace.schedule.actions import Action, Kind
from pptrace.tables import Category, Events

_SENDS, _RECVS = "c10d::send", ("c10d::recv_", "c10d::recv_any_source_")
_ENGINE = "autograd::engine::evaluate_function"
_OPTIMIZER = re.compile(r"Optimizer\.(?:step|zero_grad)#")
_COMMUNICATION = re.compile(r"c10d::|record_param_comms|gloo:|nccl:")
_LEAST_SHARE = 4
"""A forward has at least one in so many of the operators of the largest one; less is what the schedule does between ops."""


@dataclass(frozen=True, slots=True)
class Inferred:
    """A stretch of the host's time that is an op or the posting of a message; stage −1: its rank's only one."""

    action: Action
    start_ns: int
    end_ns: int
    thread: int


class _Token(Enum):
    FORWARD = auto()
    BACKWARD = auto()
    SEND = auto()
    RECV = auto()
    OPTIMIZER = auto()


@dataclass(slots=True)
class _Run:
    """Consecutive operators of one kind, or one message."""

    token: _Token
    start_ns: int
    end_ns: int
    count: int = 1


def infer_ops(events: Events) -> list[Inferred]:
    """Ops and messages in time order; [] where no thread both sends or receives and computes."""
    thread = _pipeline_thread(events)
    if thread is None:
        return []
    return list(_numbered(_without_scraps(_runs(events, thread)), thread))


def messages_in_ranges(events: Events, ops: Sequence[Inferred]) -> list[Inferred]:
    """The messages posted inside labelled ops (ScheduleGPipe): of the op's own microbatch."""
    found = []
    forward = {Kind.F: (Kind.SEND_F, Kind.RECV_F), Kind.B: (Kind.SEND_B, Kind.RECV_B)}
    for names, place in (((_SENDS,), 0), (_RECVS, 1)):
        for row in np.flatnonzero(_named(events, names)).tolist():
            start, end = int(events.start_ns[row]), int(events.start_ns[row] + events.dur_ns[row])
            thread = int(events.thread[row])
            around = next((o for o in ops if o.thread == thread and o.start_ns <= start and end <= o.end_ns), None)
            if around is not None and around.action.kind in forward:
                action = Action(forward[around.action.kind][place], -1, around.action.microbatch)
                found.append(Inferred(action, start, end, thread))
    return found


def _pipeline_thread(events: Events) -> int | None:
    """The thread that posts most sends and receives."""
    rows = np.flatnonzero(_named(events, (_SENDS, *_RECVS)))
    if not len(rows):
        return None
    threads, counts = np.unique(events.thread[rows], return_counts=True)
    return int(threads[counts.argmax()])


def _named(events: Events, names: Sequence[str]) -> npt.NDArray[np.bool_]:
    wanted = np.array([name in names for name in events.names], dtype=bool)
    chosen: npt.NDArray[np.bool_] = wanted[events.name_id] & (events.category == Category.CPU_OP)
    return chosen


def _runs(events: Events, thread: int) -> list[_Run]:
    """What the thread does, one entry for each message and for each unbroken run of operators."""
    runs: list[_Run] = []
    for token, start, end in _tokens(events, thread):
        last = runs[-1] if runs else None
        if last is not None and last.token is token and token in (_Token.FORWARD, _Token.BACKWARD):
            last.end_ns, last.count = max(last.end_ns, end), last.count + 1
        else:
            runs.append(_Run(token, start, end))
    return runs


def _tokens(events: Events, thread: int) -> Iterator[tuple[_Token, int, int]]:
    """Outermost operators of the thread, the engine's of all threads, messages and optimizer steps, in time order."""
    engine = np.array([name.startswith(_ENGINE) for name in events.names], dtype=bool)[events.name_id]
    optimizer = np.array([bool(_OPTIMIZER.match(name)) for name in events.names], dtype=bool)[events.name_id]
    other = np.array([bool(_COMMUNICATION.match(name)) for name in events.names], dtype=bool)[events.name_id]
    send, recv = _named(events, (_SENDS,)), _named(events, _RECVS)
    is_op = events.category == Category.CPU_OP
    mine = events.thread == thread
    is_step = optimizer & (events.category == Category.ANNOTATION)
    chosen = np.flatnonzero((is_op & (mine | engine) & (~other | send | recv)) | is_step)
    over = -1
    ends = events.end_ns
    for row in chosen.tolist():
        start, end = int(events.start_ns[row]), int(ends[row])
        if start < over:
            continue  # inside another
        over = end
        if is_step[row]:
            yield _Token.OPTIMIZER, start, end
        elif send[row] or recv[row]:
            yield (_Token.SEND if send[row] else _Token.RECV), start, end
        else:
            yield (_Token.BACKWARD if engine[row] else _Token.FORWARD), start, end


def _without_scraps(runs: Sequence[_Run]) -> list[_Run]:
    """The runs without forwards too short to be one, such as the making of a loss's gradient, and without those that no
    backward of the step follows, such as the scaling of gradients.
    """
    largest = max((run.count for run in runs if run.token is _Token.FORWARD), default=0)
    kept: list[_Run] = []
    is_followed = False
    for run in reversed(runs):
        if run.token is _Token.OPTIMIZER:
            is_followed = False
        elif run.token is _Token.BACKWARD:
            is_followed = True
        elif run.token is _Token.FORWARD and not (is_followed and _LEAST_SHARE * run.count >= largest):
            continue
        kept.append(run)
    return kept[::-1]


def _numbered(runs: Sequence[_Run], thread: int) -> Iterator[Inferred]:
    forwards = backwards = 0
    for place, run in enumerate(runs):
        if run.token is _Token.OPTIMIZER:
            forwards = backwards = 0
            continue
        if run.token is _Token.FORWARD:
            action = Action(Kind.F, -1, forwards)
            forwards += 1
        elif run.token is _Token.BACKWARD:
            action = Action(Kind.B, -1, backwards)
            backwards += 1
        else:
            found = _message(runs, place, forwards, backwards)
            if found is None:
                continue
            action = found
        yield Inferred(action, run.start_ns, run.end_ns, thread)


def _message(runs: Sequence[_Run], place: int, forwards: int, backwards: int) -> Action | None:
    """A send belongs to the op before it, a receive to the op after it."""
    computing = (_Token.FORWARD, _Token.BACKWARD, _Token.OPTIMIZER)
    sends = runs[place].token is _Token.SEND
    nearby = runs[place - 1 :: -1] if sends and place else runs[place + 1 :] if not sends else ()
    op = next((run.token for run in nearby if run.token in computing), _Token.OPTIMIZER)
    if op is _Token.OPTIMIZER:
        return None
    if op is _Token.FORWARD:
        return Action(Kind.SEND_F, -1, forwards - 1) if sends else Action(Kind.RECV_F, -1, forwards)
    return Action(Kind.SEND_B, -1, backwards - 1) if sends else Action(Kind.RECV_B, -1, backwards)
