"""Trust in inferred ops: messages of one stage per rank, and what happens where they are not."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from pptrace.model.tables import COMM_ARGS
from pptrace.model.traces import Category
from pptrace.recognise.ops.infer_from_operators import confidence, is_one_stage, peers_of
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from tests.roundtrip.files import recognise_run
from tests.roundtrip.styles import Host, MegatronNvtx, TorchOneFOneB
from tests.roundtrip.test_roundtrip import check_messages
from tests.support.found_ops import cells, planned
from tests.support.synthetic import MAIN_THREAD, Event, PaperRun, make_trace, run_on_paper
from tests.support.tables import table_of

INTERLEAVED = run_on_paper(build("interleaved-1f1b", 4, 8, 2), lambda action: 500, latency=130)
ONE_STAGE = run_on_paper(build("1f1b", 4, 8), lambda action: 500, latency=130)

ALL = [Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B]


@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        ((2, 0, 0, 2), True),
        ((-1, -1, -1, -1), True),
        ((1, 1, 1, 1), False),
        ((2, 0, 2, 0), False),
        ((2, 0, 1, 2), False),
        ((2, 0, 0, 3), False),
    ],
)
def test_a_rank_with_one_stage_has_one_neighbour_on_each_side(peers: tuple[int, ...], expected: bool) -> None:
    messages = list(zip(ALL * 8, peers * 8, strict=True))
    assert is_one_stage(messages, ALL * 8, 8, 8) is expected


def test_a_rank_with_one_stage_moves_a_message_for_all_of_its_ops_or_for_none() -> None:
    assert is_one_stage([], [Kind.SEND_F] * 8 + [Kind.RECV_B] * 7, 8, 8)
    assert not is_one_stage([], [Kind.SEND_F] * 8 + [Kind.RECV_F] * 4, 8, 8)


@pytest.mark.parametrize(
    ("counts", "agree", "word"),
    [
        ((95, 100, 8, 8), True, "high"),
        ((95, 100, 8, 8), False, "medium"),
        ((80, 100, 8, 8), True, "medium"),
        ((70, 100, 8, 8), True, "low"),
        ((95, 100, 8, 5), True, "low"),
    ],
)
def test_the_word_of_confidence_follows_its_rule(counts: tuple[int, int, int, int], agree: bool, word: str) -> None:
    assert confidence(*counts, agree) == f"{word} confidence"


def test_the_peer_of_a_call_is_that_of_the_record_inside_it() -> None:
    listed = [
        Event(Category.CPU_OP, name, start, start + size, thread=MAIN_THREAD)
        for name, start, size in (("c10d::send", 10, 9), ("record_param_comms", 12, 3), ("c10d::send", 30, 9))
    ]
    events = make_trace(listed, 0).events
    args = table_of(COMM_ARGS, [{"event": 1, "dst": 3}], -1)
    assert peers_of(replace(events, comm_args=args), np.array([0, 2])) == [3, -1]


def test_interleaved_messages_do_not_hide_the_order_of_the_ops() -> None:
    """Each batch of messages goes both ways."""
    run = recognise_run(TorchOneFOneB(), INTERLEAVED, 2)
    assert run.schedule.name == "interleaved-1f1b"
    for rank in range(4):
        assert cells(run, rank, 0) == planned(INTERLEAVED.plan, rank)
    check_messages(INTERLEAVED, 2, run)
    assert any("not those of one stage per rank" in line for line in run.warnings)


class OneFunction(MegatronNvtx):
    """All messages by the function that sends and receives both ways."""

    def messages_name(self, plan: Plan, rank: int, actions: object) -> str:
        return f"{self.PACKAGE}.p2p_communication.send_forward_backward_recv_forward_backward"


def test_what_a_function_moved_that_may_move_four_messages_the_ops_beside_it_tell() -> None:
    run = recognise_run(OneFunction(), INTERLEAVED, 2)
    assert run.schedule.name == "interleaved-1f1b"
    assert any(
        "there are more labelled messages than interleaved-1f1b has: only those" in line for line in run.warnings
    )
    check_messages(INTERLEAVED, 2, run)


class Delayed(OneFunction):
    """One message is under way until after the op that should have read it."""

    def step(self, run: PaperRun, rank: int, number: int, at: int) -> list[Event]:
        events = super().step(run, rank, number, at)
        kernels = [index for index, event in enumerate(events) if event.name.startswith("ncclDevKernel")]
        late = events[kernels[4]]
        events[kernels[4]] = Event(**{**vars(late), "end": late.end + 2500})
        return events


def test_messages_that_are_not_beside_their_ops_are_not_guessed_at() -> None:
    run = recognise_run(Delayed(), INTERLEAVED, 2)
    assert run.schedule.name == "interleaved-1f1b"
    assert not (run.comms["stage"] >= 0).any()
    assert any("the real ones cannot be identified" in line for line in run.warnings)


class CalledByAll(MegatronNvtx):
    """The functions of messages are called where there is no other side as well, and launch nothing."""

    def finish(self, host: Host, run: PaperRun, rank: int, number: int) -> None:
        host.range(self.messages_name(run.plan, rank, [Action(Kind.SEND_F, 0, 0)]), run.end + 1, run.end + 2)
        super().finish(host, run, rank, number)


def test_a_function_without_a_kernel_moved_nothing() -> None:
    want, result = (recognise_run(style, ONE_STAGE, 2) for style in (MegatronNvtx(), CalledByAll()))
    assert len(result.comms) == len(want.comms) > 0
    assert (result.comms["match"] >= 0).all()


class KernelsOfOptimizers(TorchOneFOneB):
    """No range names the optimizer, whose operators and kernels come at the end of a step."""

    def finish(self, host: Host, run: PaperRun, rank: int, number: int) -> None:
        for index in range(5):
            begin = run.end + 10 + 10 * index
            host.operator("aten::_foreach_add_", begin, begin + 8)
            host.launch("multi_tensor_apply_kernel", begin + 2, begin + 90, begin + 95, MAIN_THREAD)


def test_steps_are_told_by_the_kernels_of_optimizers_beside_operators() -> None:
    run = recognise_run(KernelsOfOptimizers(), ONE_STAGE, 2)
    assert set(run.ops.loc[run.ops["kind"] == "F", "step"]) == {0, 1}
    for rank in range(4):
        assert cells(run, rank, 0) == planned(ONE_STAGE.plan, rank)
