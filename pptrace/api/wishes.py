"""Options of ``whatif``: changes of a run, and what is taken for granted of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from pptrace.analysis.links.types import Link
from pptrace.api.options import Value, option, options_of
from pptrace.errors import UsageError
from pptrace.schedule.layout import read_split

if TYPE_CHECKING:
    from pptrace.api.run import Run


@dataclass(frozen=True, slots=True)
class Wishes:
    """Changes as a user asks for them; what is None or empty stays as it is in the run."""

    schedules: str | Sequence[str] = option(
        (),
        Value.NAMES,
        "With this schedule, or each of several; all: every one of the catalogue.",
        "NAME,NAME|all",
        flag="schedule",
        label="Schedule",
        hint='a schedule, such as "zb-h1"; "all" for every one',
    )
    _: KW_ONLY
    chunks: int | None = option(
        None,
        Value.WHOLE,
        "With this number of virtual stages per rank.",
        label="Chunks",
        hint="virtual stages of a rank",
    )
    microbatches: int | None = option(
        None,
        Value.WHOLE,
        "With this number of microbatches in a step, of today's size.",
        label="Microbatches",
        hint="of a step, of the size they have",
    )
    microbatch_size: float | None = option(
        None,
        Value.TIMES,
        "With microbatches X times today's size.",
        "X",
        label="Microbatch size",
        hint="of a microbatch, times today's",
    )
    split: Sequence[int] | None = option(
        None,
        Value.SPLIT,
        "With these layers in each stage: 5,5,5,3, or Megatron-LM's layout Et*5|t*5|t*5|t*3,L.",
        "SPLIT",
        label="Split",
        hint="layers of each stage of the model, such as 5,5,5,3 or Megatron-LM's Et*5|t*5|t*5|t*3,L",
    )
    ideals: str | Sequence[str] = option(
        (),
        Value.NAMES,
        "If stage=N, rank=N, kind=K, jitter, communication, stragglers, host or routing cost what their like do; "
        "outside=PART: if data, … took no time.",
        "WHAT",
        flag="ideal",
    )
    link_speed: float | None = option(
        None,
        Value.TIMES,
        "With messages X times as fast.",
        "X",
        label="Link speed",
        hint="messages so many times as fast",
    )
    collective_speeds: str | Sequence[str] = option(
        (),
        Value.NAMES,
        "With the collectives inside ops along an axis (tp, cp, ep) X times as fast, as over other links.",
        "AXIS=X",
        flag="collective-speed",
    )
    links: Run | Sequence[Link] | None = option(
        None,
        Value.RUN,
        "Take the latencies of links from this run on the same ranks, with messages of several sizes: no change of the run.",
        "PATH",
        is_change=False,
    )
    layers: Sequence[int] | None = option(
        None,
        Value.SPLIT,
        "The layers of the run's stages, where its trace does not say.",
        "SPLIT",
        label="Layers today",
        hint="layers of the run's stages, where its trace does not say",
        is_change=False,
    )
    wgrad_share: float | None = option(
        None,
        Value.SHARE,
        "W's part of a full B, where the run has no W: no change of the run [default: what its operators tell, else "
        "0.35 of what is no recompute].",
        "X",
        label="W's share",
        hint="part of a full backward that is W's, where the run does not tell",
        is_change=False,
    )
    fixed_share: float | None = option(
        None,
        Value.SHARE,
        "The part of an op that it takes however much it does: no change of the run [default: what its stages tell, else 0, in "
        "the interval to 0.06].",
        "X",
        label="Fixed share",
        hint="part of a usual op that any takes however much it does",
        is_change=False,
    )
    placement: Sequence[int] | None = option(
        None, Value.LIST, "With the pipeline's ranks in this order of today's.", "N,N,…"
    )
    recompute_layers: int | None = option(
        None,
        Value.DEPTH,
        "With N layers of each stage that recompute their forward in the backward, 0: none.",
        "N",
    )
    prefetch: int | None = option(None, Value.DEPTH, "With receives posted N ops before they are needed.", "N")
    repair_order: bool = option(
        False,
        Value.FLAG,
        "With receives posted later that hold up other calls: sends and receives in another order.",
        label="Repair order",
        hint="receives posted later that hold up other calls",
    )
    memory_limit: int | None = option(
        None,
        Value.SIZE,
        "The most that a rank may have, such as 80GB or 74GiB: no change of the run.",
        "BYTES",
        is_change=False,
    )
    verify: bool = option(
        False, Value.FLAG, "Run it in real processes, with ops that sleep as long as theirs took.", is_change=False
    )

    def __post_init__(self) -> None:
        for one in options_of(Wishes).values():
            given = getattr(self, one.name)
            if one.takes in _AS_TUPLES and given is not None:
                if isinstance(given, str):
                    given = read_split(given, one.flag) if one.takes is Value.SPLIT else (given,)
                object.__setattr__(self, one.name, tuple(given))
        object.__setattr__(self, "links", _links(self.links))

    def __bool__(self) -> bool:
        return self != self.assumed

    @property
    def assumed(self) -> Wishes:
        """The same without the changes."""
        return Wishes(**{name: getattr(self, name) for name, one in options_of(Wishes).items() if not one.is_change})


_AS_TUPLES = (Value.NAMES, Value.LIST, Value.SPLIT)
FORM = {one.form_name: one for one in options_of(Wishes).values() if one.label}
"""The options that forms, addresses and assistants have, by the names of their fields."""


def _links(given: Any) -> tuple[Link, ...]:
    if given is None or isinstance(given, tuple):
        return given or ()
    links: tuple[Link, ...] = getattr(getattr(given, "report", None), "links", None) or ()
    if not links:
        raise UsageError("links: expected a run with messages between two ranks, as pptrace.load gives it")
    return links
