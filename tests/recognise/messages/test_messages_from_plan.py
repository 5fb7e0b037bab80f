"""Messages that say only that they are sent or received, and the plan of the ops beside them."""

from __future__ import annotations

import pandas as pd
import pytest

from pptrace.recognise.messages.messages_from_plan import label_from_plan
from pptrace.schedule.registry import build
from tests.support.found_ops import message_names
from tests.support.synthetic import run_on_paper
from tests.support.tables import named

RUN = run_on_paper(build("interleaved-1f1b", 2, 4, 2), lambda action: 500, latency=130)


def tables(rank: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The messages of a rank, whose kernels end as they do on paper, without their names; and its ops."""
    calls = [("send" if d.action.kind.is_send else "recv", d.start, d.end, str(d.action)) for d in RUN.transfers(rank)]
    ops = [(d.action.kind.value, d.action.stage, d.action.microbatch, d.start, d.end) for d in RUN.computes(rank)]
    unnamed = {"step": 0, "axis": "pp", "direction": "", "stage": -1, "microbatch": -1, "peer": -1}
    return (
        pd.DataFrame(named("kind start_ns end_ns expected", calls)).assign(**unnamed),
        pd.DataFrame(named("kind stage microbatch start_ns end_ns", ops)).assign(step=0),
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_messages_in_the_order_of_the_plan_are_its_messages(rank: int) -> None:
    calls, ops = tables(rank)
    labelled = label_from_plan(calls, ops, lambda step: RUN.plan, (4, 9), (4, 9)[rank])
    assert message_names(labelled) == calls["expected"].tolist()
    assert set(labelled["peer"]) == {(9, 4)[rank]}


@pytest.mark.parametrize("times", [2, 3])
def test_each_message_may_have_several_tensors(times: int) -> None:
    calls, ops = tables(0)
    several = calls.loc[calls.index.repeat(times)].reset_index(drop=True)
    assert (
        message_names(label_from_plan(several, ops, lambda step: RUN.plan, (0, 1), 0)) == several["expected"].tolist()
    )


def test_other_messages_than_planned_are_not_named() -> None:
    calls, ops = tables(0)
    sends = calls["kind"] == "send"
    late_op = ops.assign(end_ns=ops["end_ns"].where(ops.index != 0, calls.loc[sends, "start_ns"].min() + 1))
    for kind, changed, of in (
        ("send", calls.drop(index=calls.index[sends][0]), ops),
        ("send", calls, late_op),
        ("recv", calls.assign(end_ns=calls["end_ns"].where(sends, calls["end_ns"] + 10_000)), ops),
    ):
        labelled = label_from_plan(changed, of, lambda step: RUN.plan, (0, 1), 0)
        assert (labelled.loc[labelled["kind"] == kind, "microbatch"] == -1).all()
        assert (labelled.loc[labelled["kind"] != kind, "microbatch"] >= 0).all()
