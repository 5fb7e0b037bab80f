"""``pptrace.simulate`` and ``pptrace.schedules``: schedules on paper."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import pptrace
from pptrace.errors import ScheduleError
from pptrace.model.tables import OPS
from pptrace.schedule import registry
from tests.support.programs import pptrace_here


def test_json_and_page_are_those_of_the_command_line(tmp_path: Path) -> None:
    sizes = ("--pp", "4", "--microbatches", "8", "--chunks", "3", "--forward", "2", "--backward", "5", "--p2p", "0.25")
    files = ("--json", tmp_path / "s.json", "--html", tmp_path / "s.html", "--csv", tmp_path / "s.csv", "--ops")
    assert pptrace_here("simulate", "interleaved-1f1b", *sizes, *files).code == 0
    step = pptrace.simulate("interleaved-1f1b", pp=4, microbatches=8, chunks=3, forward=2, backward=5, p2p=0.25)
    assert step.to_json(ops=True) == (tmp_path / "s.json").read_text(encoding="utf-8")
    assert step.to_html() == (tmp_path / "s.html").read_text(encoding="utf-8")
    assert step.to_csv() == (tmp_path / "s.csv").read_text(encoding="utf-8")


def test_a_name_its_plan_and_its_csv_give_the_same_step(tmp_path: Path) -> None:
    named = pptrace.simulate("zb-h1", pp=4, microbatches=6, forward=3, backward=5, wgrad=2)
    named.to_csv(tmp_path / "zb-h1.csv")
    costs = {"forward": 3.0, "backward": 5.0, "wgrad": 2.0}
    for given in (pptrace.schedules["zb-h1"].build(4, 6), tmp_path / "zb-h1.csv", str(tmp_path / "zb-h1.csv")):
        step = pptrace.simulate(given, **costs)
        columns = ["rank", "kind", "stage", "microbatch", "start_ns", "end_ns"]
        assert step.ops[columns].equals(named.ops[columns])
        assert step.bubble_ratio == named.bubble_ratio


def test_ops_have_the_columns_of_a_measured_run_and_a_picture() -> None:
    step = pptrace.simulate("1f1b", pp=2, microbatches=3)
    assert list(step.ops.columns) == list(OPS)
    assert set(step.ops.source) == {"simulated"}
    assert (step.ranks.compute_ns + step.ranks.bubble_ns == step.makespan_ns).all()
    assert f"&quot;span&quot;:{step.makespan_ns}," in step.timeline().to_html()
    assert "&quot;span&quot;:30000000," in step.timeline(extent_ns=30_000_000).to_html()


def test_the_summary_has_a_row_for_each_rank_up_to_sixteen() -> None:
    assert "bubble ratio <b>0.375</b>" in pptrace.simulate("1f1b", pp=4, microbatches=8)._repr_html_()
    assert "16 more in .ranks" in pptrace.simulate("1f1b", pp=32, microbatches=4)._repr_html_()
    assert repr(pptrace.simulate("1f1b", pp=4, microbatches=8)) == (
        "<pptrace.SimulatedStep: 1f1b, pp=4, num_microbatches=8, num_chunks=1, 33 ms, bubble ratio 0.3750>"
    )


def test_the_catalogue_builds_what_the_registry_builds() -> None:
    assert list(pptrace.schedules) == list(registry.SCHEDULES)
    for name, schedule in pptrace.schedules.items():
        plan = schedule.build(pp=2, microbatches=4)
        assert plan == registry.build(name, 2, 4)
        assert len(repr(plan)) < 100
        assert str(plan).count("\n") == 1
    assert all(f">{name}<" in pptrace.schedules._repr_html_() for name in pptrace.schedules)


def test_a_plan_with_messages_is_drawn_in_order() -> None:
    from pptrace.schedule.lower import lower

    assert str(lower(pptrace.schedules["gpipe"].build(2, 1))) == (
        "rank 0 | 0F0      0SEND_F0 0RECV_B0 0B0\nrank 1 | 1RECV_F0 1F0      1B0      1SEND_B0"
    )


def test_a_name_that_is_not_in_the_catalogue_is_a_key_error_and_one_of_ours() -> None:
    assert "nope" not in pptrace.schedules
    assert pptrace.schedules.get("nope") is None
    with pytest.raises(KeyError) as caught:
        pptrace.schedules["nope"]
    assert isinstance(caught.value, pptrace.PptraceError)
    assert str(caught.value).startswith("schedule 'nope' is not known; expected one of gpipe, ")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: pptrace.simulate("nope", pp=2, microbatches=2), "schedule 'nope' is not known"),
        (
            lambda: pptrace.simulate("1f1b", pp=2),
            "microbatches is not given; a named schedule needs pp and microbatches",
        ),
        (
            lambda: pptrace.simulate("1f1b", pp=2, microbatches=2, forward=float("nan")),
            "forward is nan; expected milliseconds",
        ),
        (lambda: pptrace.simulate("1f1b", pp=2, microbatches=2, wgrad=9), "wgrad is 9; it is a part of backward"),
        (lambda: pptrace.simulate(Path("missing"), pp=2, microbatches=2), "missing: cannot be read"),
        (
            lambda: pptrace.simulate(pptrace.schedules["1f1b"].build(2, 2), pp=3),
            "1f1b: pp 3 does not fit the plan, which has 2; leave the option away",
        ),
        (
            lambda: pptrace.simulate(pptrace.schedules["1f1b"].build(2, 2), group_size=2),
            "1f1b: group_size does not change a plan; leave the option away",
        ),
    ],
)
def test_a_mistake_is_an_error_of_one_line(call: Callable[[], object], said: str) -> None:
    with pytest.raises(pptrace.PptraceError) as caught:
        call()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_plan_that_deadlocks_is_refused_with_its_drawing(tmp_path: Path) -> None:
    file = tmp_path / "bad.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F1,1B0,1F0,1B1\n", encoding="utf-8")
    with pytest.raises(ScheduleError, match="deadlock: rank 1 waits at 1B0") as caught:
        pptrace.simulate(file)
    assert ">1B0<" in caught.value.grid
    assert json.loads(pptrace.simulate("1f1b", pp=1, microbatches=1).to_json())["schedule"] == "1f1b"


def test_idle_time_sums_to_the_bubble_of_each_rank() -> None:
    step = pptrace.simulate("v-min", pp=4, microbatches=8, p2p=0.1)
    lengths = (step.idle["end_ns"] - step.idle["start_ns"]).groupby(step.idle["rank"]).sum()
    assert lengths.tolist() == step.ranks["bubble_ns"].tolist()
    assert set(step.idle["cause"]) <= {"fill", "warmup", "steady", "cooldown", "drain", "message", "order"}
    waits = step.idle[step.idle["cause"] == "warmup"].iloc[0]
    assert (waits["before"], waits["other"], waits["other_rank"]) == ("7F0", "6F0", 1)
