"""The names of ranges: written by the runtime, read back by the analyser, legible to a person in Nsight or Perfetto.

Grammar, version 1:

    name   = "pp1:" (op | p2p | wait | collective | exchange | call | await | span) { " " key "=" value }
    op     = action                                  e.g.  pp1:2F3 chunk=0 phase=steady step=7
    p2p    = "p2p" … ops=transfer{","transfer}       e.g.  pp1:p2p step=7 axis=pp ops=2SEND_F3>5@4096,2RECV_B0<5@4096
    wait   = "wait" … op=transfer                    e.g.  pp1:wait step=7 op=2RECV_B0<5@4096
    collective = "all_reduce" | "all_gather" | …     e.g.  pp1:all_reduce step=7 axis=dp size=4 bytes=1048576
                 … got= rows=sent{","sent}">"got{","got}    pp1:all_to_all step=7 axis=ep size=2 bytes=640 got=256 rows=3,7>3,1
    exchange = "exchange" … ops=link{","link}        e.g.  pp1:exchange step=7 axis=cp ops=>5@4096,<3@4096
    call   = "call" … kind= group= seq=              e.g.  pp1:call step=7 kind=send group=0 seq=4 bytes=4096 peer=5 handle=3
    await  = "await" …                               e.g.  pp1:await step=7 axis=cp handle=12
    span   = "STEP" | "OPTIMIZER" | "RECOMPUTE" | …  e.g.  pp1:STEP step=7
    transfer = action [ "." tensor ] link            "." and its number where a message has several: 2SEND_F3.1>5@512
    link   = (">" | "<") peer "@" bytes              ">" to, "<" from; peer is a global rank

The digits after "pp" are the version of the grammar. A name with another version is :class:`UnknownMark`: it is counted and
reported, never guessed at. A name that does not begin with "pp<digits>:" is no mark.

A ``p2p`` range begins when its transfers are posted and lasts until all are complete; inside it each transfer has a ``wait``
range, whose end says when that transfer was seen complete. Where transfers are posted ahead of the compute that reads them,
the ``p2p`` range ends with the posting and the ``wait`` ranges follow later, one for each transfer all the same.

An all-to-all of uneven parts hands in ``bytes`` and gets ``got``; ``rows`` are how many it sends to each member and gets from
each, in the order of the group: what one sends to another is what that one gets from it.

An ``exchange`` is point-to-point too, but its messages carry no microbatch: the steps of a ring, or control messages. A
collective or an exchange whose range ends with the posting has a ``handle``, a number that its rank uses once; an ``await``
range with the same handle follows, and its end says when the call was seen complete.

A ``call`` is a collective or a message of a runtime that pptrace only watches: it names the process group, whose ranks and axis
are in the trace's metadata, and counts the calls of that group (of a message: those of its direction with that peer). The
``phase`` of an op is left out where no plan tells it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from pptrace.axes import Axis as Axis
from pptrace.errors import ScheduleError
from pptrace.schedule.actions import Action, Phase, parse_action

VERSION = 1
DOMAIN = "pptrace"
PREFIX = f"pp{VERSION}:"
PART = "part: "
"""Before the name of a range that names a part of the model, inside of an op."""
METADATA_KEY = "pptrace"
"""The key of the top-level object in a Kineto trace that holds the rank's facts: rank, mesh, plan, clock, versions."""
METADATA_TABLE = "PPTRACE_METADATA"
"""The table of an Nsight Systems export that holds the same of each process: (pid INTEGER, facts TEXT), facts as JSON."""


class Collective(StrEnum):
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    BARRIER = "barrier"


class SpanKind(StrEnum):
    """Ranges that are neither schedule ops nor communication."""

    STEP = "STEP"
    OPTIMIZER = "OPTIMIZER"
    GRAD_SYNC = "GRAD_SYNC"
    DATA = "DATA"
    EVAL = "EVAL"  # a pass of a pipeline without backwards
    GC = "GC"  # a garbage collection of Python
    RECOMPUTE = "RECOMPUTE"  # inside a B or an I: a forward that runs again, because its activations were not saved


@dataclass(frozen=True, slots=True)
class OpMark:
    """A schedule op: F, B, I, W or an overlapped pair. Without ``has_phase``, the action's phase says nothing."""

    action: Action
    step: int
    has_phase: bool = True


@dataclass(frozen=True, slots=True)
class Transfer:
    """One send or receive; ``peer`` is the global rank at the other end, ``tensor`` which of a message's tensors, if several."""

    action: Action
    peer: int
    bytes: int
    tensor: int | None = None


@dataclass(frozen=True, slots=True)
class P2PMark:
    """A P2P call: one or more transfers that were posted together."""

    transfers: tuple[Transfer, ...]
    axis: Axis
    step: int


@dataclass(frozen=True, slots=True)
class WaitMark:
    """The wait for one transfer, inside its P2P range."""

    transfer: Transfer
    step: int


@dataclass(frozen=True, slots=True)
class Uneven:
    """The share of a rank in an all-to-all of uneven parts: bytes, and the rows sent to and received from each member."""

    received_bytes: int
    sent_rows: tuple[int, ...]
    received_rows: tuple[int, ...]

    @property
    def splits(self) -> str:
        """The rows as text: sent to each member, ">", received from each."""
        sent, received = (",".join(map(str, rows)) for rows in (self.sent_rows, self.received_rows))
        return f"{sent}>{received}"


@dataclass(frozen=True, slots=True)
class CollectiveMark:
    """A collective over ``size`` ranks of ``axis``; ``bytes`` is this rank's message, as nccl-tests counts it.

    Of an all-to-all of uneven parts ``bytes`` is what the rank hands in; ``uneven`` has what it receives.
    """

    kind: Collective
    axis: Axis
    size: int
    bytes: int
    step: int
    handle: int | None = None
    uneven: Uneven | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """One message to (``sends``) or from a peer, a global rank."""

    sends: bool
    peer: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ExchangeMark:
    """Point-to-point messages without a microbatch, posted together."""

    links: tuple[Link, ...]
    axis: Axis
    step: int
    handle: int | None = None


@dataclass(frozen=True, slots=True)
class CallMark:
    """A collective or one message of a watched runtime: ``kind`` is a collective's, ``send`` or ``recv``.

    ``peer`` is a global rank, None where there is none or any may send; ``sequence`` counts from 0 as in the grammar.
    """

    kind: str
    group: str
    sequence: int
    bytes: int
    step: int
    peer: int | None = None
    handle: int | None = None


@dataclass(frozen=True, slots=True)
class AwaitMark:
    """The wait for a collective, an exchange or a call that was posted before."""

    axis: Axis
    step: int
    handle: int


@dataclass(frozen=True, slots=True)
class SpanMark:
    kind: SpanKind
    step: int


@dataclass(frozen=True, slots=True)
class UnknownMark:
    """A name with pptrace's prefix that this version cannot read: another grammar version, or damaged."""

    text: str
    reason: str


P2P = ("send", "recv")
"""Kinds of a message between two ranks."""
_COLLECTIVES = frozenset(Collective)
_CALLS = frozenset({*_COLLECTIVES, *P2P})
_SPANS = frozenset(SpanKind)

Mark = OpMark | P2PMark | WaitMark | CollectiveMark | ExchangeMark | CallMark | AwaitMark | SpanMark


def format_mark(mark: Mark) -> str:
    """The range name of a mark. :func:`parse_mark` is its inverse."""
    match mark:
        case OpMark(action, step, has_phase):
            phase = f" phase={action.phase}" if has_phase else ""
            return f"{PREFIX}{action} chunk={action.chunk}{phase} step={step}"
        case P2PMark(transfers, axis, step):
            return f"{PREFIX}p2p step={step} axis={axis} ops={','.join(map(_format_transfer, transfers))}"
        case WaitMark(transfer, step):
            return f"{PREFIX}wait step={step} op={_format_transfer(transfer)}"
        case CollectiveMark(kind, axis, size, num_bytes, step, handle, uneven):
            parts = "" if uneven is None else f" got={uneven.received_bytes} rows={uneven.splits}"
            end = f"{parts}{_format_handle(handle)}"
            return f"{PREFIX}{kind} step={step} axis={axis} size={size} bytes={num_bytes}{end}"
        case ExchangeMark(links, axis, step, handle):
            ops = ",".join(map(_format_link, links))
            return f"{PREFIX}exchange step={step} axis={axis} ops={ops}{_format_handle(handle)}"
        case CallMark(kind, group, sequence, num_bytes, step, peer, handle):
            end = f"{'' if peer is None else f' peer={peer}'}{_format_handle(handle)}"
            return f"{PREFIX}call step={step} kind={kind} group={group} seq={sequence} bytes={num_bytes}{end}"
        case AwaitMark(axis, step, handle):
            return f"{PREFIX}await step={step} axis={axis}{_format_handle(handle)}"
        case SpanMark(kind, step):
            return f"{PREFIX}{kind} step={step}"


_PREFIXED = re.compile(r"pp\d+:", re.ASCII)
_MARK = re.compile(r"pp(\d+):(\S+)((?: [a-z_]+=\S+)*)", re.ASCII)
_TRANSFER = re.compile(r"([0-9A-Z_]+)(?:\.(\d+))?([<>]\d+@\d+)", re.ASCII)
_LINK = re.compile(r"([<>])(\d+)@(\d+)", re.ASCII)
_EMITTED_SUFFIX = re.compile(r", seq = \d+.*|, op_id = \d+.*", re.DOTALL)  # added by torch's emit_nvtx


def is_mark(name: str) -> bool:
    """Return whether a name has the prefix of a mark, of whatever version."""
    return _PREFIXED.match(name) is not None


def parse_mark(name: str) -> Mark | UnknownMark | None:
    """Read a range name: a mark, an unreadable mark with the reason, or None when it is no mark of pptrace at all."""
    if not _PREFIXED.match(name):
        return None
    match = _MARK.fullmatch(_EMITTED_SUFFIX.sub("", name))
    if match is None:
        return UnknownMark(name, "does not follow the grammar of marks")
    if int(match[1]) != VERSION:
        return UnknownMark(name, f"grammar version {match[1]}; this pptrace reads version {VERSION}")
    try:
        return _parse_body(match[2], dict(item.split("=", 1) for item in match[3].split()))
    except (KeyError, ValueError, ScheduleError) as err:
        return UnknownMark(name, f"unreadable: {err}")


def _parse_body(head: str, values: dict[str, str]) -> Mark:
    step = _number(values["step"])
    if head == "p2p":
        transfers = tuple(_parse_transfer(item) for item in values["ops"].split(","))
        return P2PMark(transfers, Axis(values["axis"]), step)
    if head == "wait":
        return WaitMark(_parse_transfer(values["op"]), step)
    if head in _COLLECTIVES:
        return CollectiveMark(
            Collective(head),
            Axis(values["axis"]),
            _number(values["size"]),
            _number(values["bytes"]),
            step,
            _parse_handle(values),
            _parse_uneven(values),
        )
    if head == "exchange":
        links = tuple(_parse_link(item) for item in values["ops"].split(","))
        return ExchangeMark(links, Axis(values["axis"]), step, _parse_handle(values))
    if head == "call":
        if values["kind"] not in _CALLS:
            raise ValueError(f"{values['kind']!r} is no collective, send or recv")
        peer = _number(values["peer"]) if "peer" in values else None
        sequence, num_bytes = _number(values["seq"]), _number(values["bytes"])
        return CallMark(values["kind"], values["group"], sequence, num_bytes, step, peer, _parse_handle(values))
    if head == "await":
        return AwaitMark(Axis(values["axis"]), step, _number(values["handle"]))
    if head in _SPANS:
        return SpanMark(SpanKind(head), step)
    phase = Phase(values.get("phase", Phase.STEADY))
    action, chunk = parse_action(head), _number(values["chunk"])
    if not action.kind.is_compute:
        raise ValueError(f"{action} is no compute action")
    tagged = Action(action.kind, action.stage, action.microbatch, chunk, phase, action.parts)
    return OpMark(tagged, step, has_phase="phase" in values)


def _number(text: str) -> int:
    """A number as marks have it: digits only, and small enough for the tables."""
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError(f"{text!r} is not a number of at most 18 digits")
    return int(text)


def _format_handle(handle: int | None) -> str:
    return "" if handle is None else f" handle={handle}"


def _parse_handle(values: dict[str, str]) -> int | None:
    return _number(values["handle"]) if "handle" in values else None


def _parse_uneven(values: dict[str, str]) -> Uneven | None:
    if not {"rows", "got"} & values.keys():
        return None
    sent, received = (tuple(map(_number, part.split(","))) for part in values["rows"].split(">"))
    return Uneven(_number(values["got"]), sent, received)


def _format_transfer(transfer: Transfer) -> str:
    tensor = "" if transfer.tensor is None else f".{transfer.tensor}"
    return f"{transfer.action}{tensor}{_format_link(Link(transfer.action.kind.is_send, transfer.peer, transfer.bytes))}"


def _format_link(link: Link) -> str:
    return f"{'>' if link.sends else '<'}{link.peer}@{link.bytes}"


def _parse_transfer(text: str) -> Transfer:
    match = _TRANSFER.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a transfer such as 2SEND_F3>5@4096")
    action = parse_action(match[1])
    link = _parse_link(match[3])
    if not action.kind.is_p2p or link.sends != action.kind.is_send:
        raise ValueError(f"{text!r}: the arrow does not fit the action")
    return Transfer(action, link.peer, link.bytes, None if match[2] is None else _number(match[2]))


def _parse_link(text: str) -> Link:
    match = _LINK.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a message such as >5@4096")
    return Link(match[1] == ">", _number(match[2]), _number(match[3]))
