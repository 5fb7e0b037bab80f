"""Overlapped pairs whose halves take turns, against the runtime's own loop, which lets them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from instrument.expert.pieces import alternate, run_through
from pptrace.analysis.aligned import RankRows
from pptrace.analysis.experts.exchanges import exchanges_of
from pptrace.analysis.experts.turns import turns_of
from pptrace.intervals import EMPTY
from pptrace.model.tables import UNKNOWN
from pptrace.schedule.actions import Action, Kind, parse_action
from pptrace.slices import Slice
from tests.support.extent import ALL
from tests.support.tables import named, slice_with

Row = dict[str, Any]
RANK, STEP, WIDTH = 3, 7, 16


@dataclass
class Exchange:
    """One that the rank made: of which half and layer, how many rows it sent and received, whether it runs ``again``, and when
    its experts ran.
    """

    action: Action
    layer: int
    sent: int
    received: int
    again: bool = False
    begin_ns: int = 0
    back_ns: int = 0


@dataclass
class Program:
    """A rank that runs forwards, backwards and overlapped pairs of stages with ``layers`` and notes all its calls."""

    rng: random.Random
    layers: dict[int, int]
    is_ahead: bool = True
    in_turns: bool = True
    recomputes: bool = False
    through: bool = False
    now: int = 0
    ops: list[Row] = field(default_factory=list)
    calls: list[Row] = field(default_factory=list)
    made: list[Exchange] = field(default_factory=list)

    def half(self, action: Action) -> Iterator[None]:
        """The pieces of a forward or backward, as :class:`instrument.expert.pieces.Tape` cuts them."""
        numbers = range(self.layers[action.stage])
        order = list(numbers if action.kind is Kind.F else reversed(numbers))
        twice = self.recomputes and action.kind is Kind.B
        for nth, layer in enumerate(layer for layer in order for _ in range(1 + twice)):
            again = twice and nth % 2 == 0
            exchange = Exchange(action, layer, self.rng.randint(1, 99), self.rng.randint(1, 99), again)
            self.made.append(exchange)
            self.now += self.rng.randint(1, 9)  # what comes before the experts
            call = self.call(exchange.sent, exchange.received)
            yield
            self.arrive(call)
            exchange.begin_ns = self.now
            self.now += self.rng.randint(1, 9)  # the experts
            call = self.call(exchange.received, exchange.sent)
            exchange.back_ns = call["start_ns"]
            yield
            self.arrive(call)
        self.now += self.rng.randint(1, 9)

    def call(self, sent: int, received: int) -> Row:
        end = self.now + 1
        call: Row = {"start_ns": self.now, "splits": f"{sent}>{received}"}
        call |= {
            "posted_ns": end if self.is_ahead else self.now,
            "bytes": sent * WIDTH,
            "received_bytes": received * WIDTH,
        }
        self.now = end
        self.calls.append(call)
        return call

    def arrive(self, call: Row) -> None:
        call["asked_ns"] = self.now
        self.now += self.rng.randint(0, 5)
        call["end_ns"] = self.now

    def run(self, text: str) -> None:
        action, start = parse_action(text), self.now
        if action.parts:
            first, second = (self.half(part) for part in action.parts)
            if self.through:
                next(first, None)
                run_through(second)
                run_through(first)
            elif self.in_turns:
                alternate(first, second)
            else:
                run_through(first)
                run_through(second)
        else:
            run_through(self.half(action))
        whole = action.parts[0] if action.parts else action
        row = {"kind": str(action.kind), "stage": whole.stage, "microbatch": whole.microbatch, "step": STEP}
        self.ops.append({**row, "start_ns": start, "end_ns": self.now, "pair": text if action.parts else ""})
        self.now += 3

    @property
    def rows(self) -> RankRows:
        """The tables of the rank; its transfers take from when it called until they came."""
        same = {"rank": RANK, "step": STEP, "kind": "all_to_all", "axis": "ep", "group_size": 2}
        comms = [same | call | {"match": number} for number, call in enumerate(self.calls)]
        for call in comms:
            call |= {"transfer_start_ns": call["start_ns"], "transfer_end_ns": call["end_ns"]}
        return RankRows(slice_with(self.ops), slice_with([]), slice_with(comms))


def program_of(
    seed: int, *, is_ahead: bool = True, in_turns: bool = True, recomputes: bool = False, through: bool = False
) -> Program:
    """Forwards and backwards of both stages alone, then pairs of either stage's forward and the other's backward."""
    rng = random.Random(seed)
    program = Program(
        rng, {0: rng.randint(0, 3), 5: rng.randint(0, 3)}, is_ahead, in_turns, recomputes or through, through
    )
    for text in ("0F0", "5F0", "5B0", "0B0", "0F1", "(0F2;5B1)OVERLAP_F_B", "(5F2;0B1)OVERLAP_F_B", "5B2", "0B2"):
        program.run(text)
    return program


COLUMNS = ("backward", "again", "stage", "microbatch", "layer", "sent", "rows", "begin_ns", "back_start_ns")


def found_in(program: Program, rows: RankRows | None = None) -> list[tuple[int, ...]]:
    found = exchanges_of(RANK, rows or program.rows, [STEP], EMPTY)
    return sorted(zip(*(found[name].tolist() for name in COLUMNS), strict=True))


def made_by(program: Program) -> list[tuple[int, ...]]:
    return sorted(
        (
            int(one.action.kind is Kind.B and not one.again),
            int(one.again),
            *(one.action.stage, one.action.microbatch, one.layer, one.sent, one.received, one.begin_ns, one.back_ns),
        )
        for one in program.made
    )


SEEDS = range(25 if ALL else 8)


@pytest.mark.parametrize("seed", SEEDS)
def test_exchanges_of_pairs_that_take_turns_are_those_that_the_runtime_s_loop_made(seed: int) -> None:
    program = program_of(seed)
    if program.calls:
        assert found_in(program) == made_by(program)


@pytest.mark.parametrize("is_ahead", [False, True], ids=["waiting", "ahead"])
@pytest.mark.parametrize("recomputes", [False, True], ids=["once", "recomputed"])
@pytest.mark.parametrize("seed", SEEDS)
def test_exchanges_of_pairs_that_run_one_half_after_the_other_are_those_of_both_stages(
    seed: int, recomputes: bool, is_ahead: bool
) -> None:
    """Whatever numbers of layers with experts they have."""
    program = program_of(seed, is_ahead=is_ahead, in_turns=False, recomputes=recomputes)
    if program.calls:
        assert found_in(program) == made_by(program)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("has_splits", [False, True], ids=["equal parts", "splits"])
def test_a_backward_that_runs_through_while_a_call_of_its_forward_is_under_way_is_left_out(
    seed: int, has_splits: bool
) -> None:
    """A backward that recomputes has no pauses, its forward some (``--recompute-microbatches-beyond``)."""
    program = program_of(seed, through=True)
    if not program.calls:
        return
    rows, made = program.rows, made_by(program)
    if not has_splits:
        num = len(program.calls)
        equal = {"splits": np.full(num, "", dtype=object), "bytes": np.ones(num), "received_bytes": np.ones(num)}
        rows = RankRows(rows.ops, rows.spans, Slice({**rows.comms.columns, **equal}))
        made = [(*one[:5], UNKNOWN, UNKNOWN, *one[7:]) for one in made]
    assert set(found_in(program, rows)) <= set(made)


def test_the_programs_have_halves_of_all_lengths() -> None:
    lengths = Counter(tuple(program_of(seed).layers.values()) for seed in SEEDS)
    assert {(first > second) - (first < second) for first, second in lengths} == {-1, 0, 1}
    assert any(0 in of and of != (0, 0) for of in lengths)


@pytest.mark.parametrize("seed", range(3, 9))
def test_of_pairs_that_do_not_post_ahead_or_have_other_numbers_of_calls_nothing_is_told(seed: int) -> None:
    program = program_of(seed)
    ops, calls = program.rows.ops, program.rows.comms
    op = np.searchsorted(ops["start_ns"], calls["start_ns"], side="right") - 1
    waiting = Slice({**calls.columns, "posted_ns": calls["start_ns"], "asked_ns": calls["start_ns"]})
    assert not turns_of(op, waiting, ops)["in_turns"].any()
    of_pairs = np.isin(op, np.flatnonzero(ops["pair"] != ""))
    assert (turns_of(op, calls, ops)["in_turns"] == of_pairs).all()
    assert not turns_of(op, waiting, ops)["is_mixed"].any()
    follow = Slice({**calls.columns, "asked_ns": np.append(calls["start_ns"][1:], calls["asked_ns"][-1:])})
    assert not turns_of(op, follow, ops)["is_mixed"].any(), "each is waited for when the next one starts"
    begun_with_pair = ops.where(np.roll(np.arange(len(ops)), -5))
    assert (turns_of((op - 5) % len(ops), calls, begun_with_pair)["in_turns"] == of_pairs).all()
    if of_pairs.any():
        without = np.delete(np.arange(len(op)), np.flatnonzero(of_pairs)[0])
        left = turns_of(op[without], calls.where(without), ops)
        assert left["in_turns"].sum() < of_pairs.sum() - 1
        assert sorted(left["order"].tolist()) == list(range(len(without)))


@pytest.mark.parametrize(
    "pair", ["", "(0F2;5", "5B1", "(0F2;0F3)OVERLAP_F_B", "(0F2;5B1)OVERLAP_F_B", "(0F2;0B1)OVERLAP_F_B"]
)
def test_a_pair_whose_halves_are_not_known_takes_no_turns(pair: str) -> None:
    """Of stage 5 no forward runs alone."""
    ops = slice_with(named("kind stage microbatch pair", [("F", 0, 0, ""), ("OVERLAP_F_B", 0, 2, pair)]))
    start = np.arange(6)
    calls = Slice({"start_ns": start, "posted_ns": start + 1, "asked_ns": start + 2})
    turns = turns_of(np.array([0, 0, 1, 1, 1, 1]), calls, ops)
    is_known = pair.startswith("(0F2;0B1)")
    assert turns["in_turns"].tolist() == [False, False, *[is_known] * 4]
    assert turns["order"].tolist() == ([0, 1, 2, 4, 3, 5] if is_known else list(range(6)))
    assert turns["microbatch"].tolist() == ([0, 0, 2, 2, 1, 1] if is_known else [0, 0, 2, 2, 2, 2])
