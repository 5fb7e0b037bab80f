"""Options of ``whatif``, written once: the command line, the form, the assistant and Python derive theirs from them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from pptrace.analysis.links.types import Link


class Value(Enum):
    """Values that options take; all but a size, a depth and a run may be in forms."""

    NAMES = "one or several names"
    WHOLE = "a whole number of at least 1"
    DEPTH = "a whole number of at least 0"
    TIMES = "how many times as much as today, more than 0"
    SHARE = "a part of something, from 0 to 1"
    LIST = "whole numbers with commas between them"
    SIZE = "bytes"
    RUN = "another run"


@dataclass(frozen=True, slots=True)
class Option:
    """An option of ``whatif``: the field ``name`` of :class:`Wishes`, ``flag`` on the command line and in forms.

    ``help`` and ``metavar`` are the command line's; ``label`` and ``hint`` those of the dashboard's form and of the assistant, ""
    where these have no such field. ``is_change`` is false for what a user only takes for granted of the run.
    """

    name: str
    flag: str
    takes: Value
    help: str
    metavar: str | None
    label: str
    hint: str
    is_change: bool

    @property
    def form_name(self) -> str:
        """The name of its field in a form or in the query of an address."""
        return self.flag.replace("-", "_")


def _wish(
    takes: Value,
    help: str,
    metavar: str | None = None,
    *,
    flag: str | None = None,
    form: tuple[str, str] = ("", ""),
    default: Any = None,
    is_change: bool = True,
) -> Any:
    """A field of the wishes with its option; ``form`` is the label of its field and what the field says."""
    return field(default=default, metadata={"option": Option("", flag or "", takes, help, metavar, *form, is_change)})


@dataclass(frozen=True, slots=True)
class Wishes:
    """Changes as a user asks for them; what is None or empty stays as it is in the run."""

    schedules: tuple[str, ...] = _wish(
        Value.NAMES,
        "With this schedule, or each of several; all: every one of the catalogue.",
        "NAME,NAME|all",
        flag="schedule",
        form=("Schedule", 'a schedule, such as "zb-h1"; "all" for every one'),
        default=(),
    )
    chunks: int | None = _wish(
        Value.WHOLE, "With this number of virtual stages per rank.", form=("Chunks", "virtual stages of a rank")
    )
    microbatches: int | None = _wish(
        Value.WHOLE,
        "With this number of microbatches in a step, of today's size.",
        form=("Microbatches", "of a step, of the size they have"),
    )
    microbatch_size: float | None = _wish(
        Value.TIMES, "With microbatches X times today's size.", "X", form=("Size", "of a microbatch, times today's")
    )
    split: tuple[int, ...] | None = _wish(
        Value.LIST,
        "With these layers in each stage.",
        "N,N,…",
        form=("Split", "layers of each stage of the model, such as 5,5,5,3"),
    )
    ideals: tuple[str, ...] = _wish(
        Value.NAMES,
        "If stage=N, rank=N, kind=K, jitter, communication, stragglers, host or routing cost what their like do; "
        "outside=PART: if data, … took no time.",
        "WHAT",
        flag="ideal",
        default=(),
    )
    link_speed: float | None = _wish(
        Value.TIMES, "With messages X times as fast.", "X", form=("Link speed", "messages so many times as fast")
    )
    links: tuple[Link, ...] = _wish(
        Value.RUN,
        "Take the latencies of links from this run on the same ranks, with messages of several sizes: no change.",
        "PATH",
        default=(),
        is_change=False,
    )
    layers: tuple[int, ...] | None = _wish(
        Value.LIST,
        "The layers of the run's stages, where its trace does not say.",
        "N,N,…",
        form=("Layers today", "layers of the run's stages, where its trace does not say"),
        is_change=False,
    )
    wgrad_share: float | None = _wish(
        Value.SHARE,
        "W's part of a full B, where the run has no W: no change [default: 0.5].",
        "X",
        form=("W's share", "part of a full backward that is W's, where the run does not tell"),
        is_change=False,
    )
    fixed_share: float | None = _wish(
        Value.SHARE,
        "The part of an op that it takes however much it does: no change [default: 0, in the interval to 0.06].",
        "X",
        form=("Fixed share", "part of a usual op that any takes however much it does"),
        is_change=False,
    )
    placement: tuple[int, ...] | None = _wish(
        Value.LIST, "With the pipeline's ranks in this order of today's.", "N,N,…"
    )
    prefetch: int | None = _wish(Value.DEPTH, "With receives posted N ops before they are needed.", "N")
    memory_limit: int | None = _wish(
        Value.SIZE, "The most that a rank may have, such as 80GB or 74GiB: no change.", "BYTES", is_change=False
    )

    def __bool__(self) -> bool:
        return self != self.assumed

    @property
    def assumed(self) -> Wishes:
        """The same without the changes."""
        return Wishes(**{option.name: getattr(self, option.name) for option in OPTIONS if not option.is_change})


OPTIONS: tuple[Option, ...] = tuple(
    replace(option, name=one.name, flag=option.flag or one.name.replace("_", "-"))
    for one in fields(Wishes)
    for option in (one.metadata["option"],)
)
"""The options in the order of the fields."""
FORM = {option.form_name: option for option in OPTIONS if option.label}
"""The options that forms, addresses and assistants have, by the names of their fields."""
