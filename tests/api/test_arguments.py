"""Whatever is given to the API: what is wrong with it is a PptraceError of one line, in the words of the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pptrace
from pptrace.api.simulate import SimulatedStep
from tests.support.programs import SAMPLES

P2 = SAMPLES / "1f1b_p2"
VALUES = ("2", 2.5, -1, 0, [], None, b"x", float("nan"), 10**400, 1j, {"a": 1}, "\0", object())


@pytest.fixture(scope="module")
def run() -> pptrace.Run:
    return pptrace.load(P2)


def _simulate(**given: Any) -> SimulatedStep:
    return pptrace.simulate("interleaved-1f1b", **{"pp": 2, "microbatches": 2, **given})


def _calls(run: pptrace.Run) -> dict[str, Callable[[Any], Any]]:
    build = pptrace.schedules["zb-auto"].build
    of_plan = ("pp", "microbatches", "chunks", "group_size", "memory_limit")
    sizes = (*of_plan, "lean", "forward", "backward", "wgrad", "p2p")
    return {
        "load": pptrace.load,
        "load of a list": lambda value: pptrace.load([value]),
        **{
            f"load {name}": lambda value, name=name: pptrace.load(P2, **{name: value})
            for name in ("schedule", "step", "jobs", "progress")
        },
        "hang": pptrace.hang,
        "simulate": lambda value: pptrace.simulate(value, pp=2, microbatches=2),
        **{f"simulate {name}": lambda value, name=name: _simulate(**{name: value}) for name in sizes},
        **{
            f"build {name}": lambda value, name=name: build(**{"pp": 2, "microbatches": 2, name: value})
            for name in (*of_plan, "costs")
        },
        "schedules": lambda value: pptrace.schedules[value],
        "figure step": lambda value: run.figure(step=value),
        "figure kind": lambda value: run.figure(kind=value),
        "width": run.to_text,
        "timeline step": lambda value: run.timeline(step=value),
        "extent": lambda value: _simulate().timeline(extent_ns=value),
    }


def test_nothing_that_is_given_raises_anything_but_a_line(run: pptrace.Run) -> None:
    outcomes = {
        (name, repr(value)[:9]): _outcome(call, value) for name, call in _calls(run).items() for value in VALUES
    }
    assert {case: outcome for case, outcome in outcomes.items() if outcome not in ("taken", "one line")} == {}
    assert list(outcomes.values()).count("one line") > 200


def _outcome(call: Callable[[Any], Any], value: object) -> str:
    try:
        call(value)
    except pptrace.PptraceError as err:
        return "one line" if "\n" not in str(err) else str(err)
    except Exception as err:
        return repr(err)
    return "taken"


def test_a_file_that_cannot_be_named_is_refused(run: pptrace.Run) -> None:
    for write in (run.to_csv, run.to_parquet, run.to_json, run.to_html, run.to_perfetto, _simulate().to_csv):
        for name in (3, "\0"):
            with pytest.raises(pptrace.PptraceError, match=r"expected a path|cannot be written"):
                write(name)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pptrace.load(3), "paths is 3; expected a path or several"),
        (lambda: pptrace.load([3]), "path is 3; expected a path"),
        (lambda: pptrace.simulate(5), "schedule is 5; expected a name of pptrace.schedules, a CSV"),
        (lambda: _simulate(microbatches=2.5), "microbatches is 2.5; expected a whole number"),
        (lambda: _simulate(forward="a"), "forward is 'a'; expected milliseconds, from 0"),
        (lambda: _simulate(forward=-3), "forward is -3; expected milliseconds, from 0"),
        (lambda: pptrace.schedules["1f1b"].build("2", 8), "pp is '2'; expected a whole number"),
        (lambda: pptrace.schedules["1f1b"].build(2, -8), "microbatches is -8; expected at least 1"),
    ],
)
def test_the_message_names_the_argument_and_what_is_expected(call: Callable[[], object], message: str) -> None:
    with pytest.raises(pptrace.PptraceError) as raised:
        call()
    assert str(raised.value).startswith(message)


def test_numbers_of_numpy_are_numbers() -> None:
    step = _simulate(pp=np.int64(2), microbatches=np.int32(4), forward=np.float32(2), backward=np.int64(4))
    assert step.bubble_ratio == _simulate(microbatches=4, forward=2, backward=4).bubble_ratio
