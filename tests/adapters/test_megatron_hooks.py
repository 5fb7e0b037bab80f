"""Hooks of Megatron-LM on modules of its shape: they run wherever the tests run, with or without megatron-core."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from instrument.adapters.hooks import Hooks
from instrument.adapters.install import Adapters
from instrument.adapters.megatron_core import MegatronHooks, Run
from instrument.adapters.megatron_plans import PassShape
from instrument.adapters.megatron_state import watch_gradients, watch_optimizers, watch_order
from instrument.adapters.watched_pass import TransferWait, WatchedPass
from instrument.adapters.works import Works
from pptrace.marks import ExchangeMark, Link, Transfer
from pptrace.schedule.actions import Action, Kind
from tests.adapters import fake_megatron
from tests.adapters.heard import HeardSession, alone_as

WITHOUT = "forward_backward_pipelining_without_interleaving"
WITH = "forward_backward_pipelining_with_interleaving"


def run_pass(schedules: ModuleType, num_microbatches: int, num_chunks: int = 1, **more: Any) -> Any:
    models = [fake_megatron.Model(more.pop("group_size", None)) for _ in range(num_chunks)]
    return getattr(schedules, WITH if num_chunks > 1 else WITHOUT)(
        forward_step_func=more.pop("step", lambda model, microbatch: torch.zeros(2)),
        model=models if num_chunks > 1 else models[0],
        num_microbatches=num_microbatches,
        **more,
    )


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_every_op_and_message_has_its_stage_and_microbatch(
    monkeypatch: pytest.MonkeyPatch, hooks: Hooks, rank: int, num_chunks: int
) -> None:
    schedules, session = fake_megatron.install(monkeypatch), HeardSession()
    with alone_as(rank, 3):
        MegatronHooks(schedules, hooks, Works(hooks), session)
        for _ in range(2):  # counting begins anew with each pass
            session.recorder.marks.clear()
            assert run_pass(schedules, 6, num_chunks, group_size=3) == ["loss"]
            assert session.words == fake_megatron.expected(3, rank, 6, num_chunks)
    assert session.num_passes == 2
    framework, plan, ranks, mesh = session.described[-1]
    assert (framework, ranks, len(session.described)) == ("megatron-lm", [0, 1, 2], 1)
    assert (plan.name, plan.num_chunks) == ("interleaved-1f1b" if num_chunks > 1 else "1f1b", num_chunks)
    assert mesh == {"tp": 1, "cp": 1, "dp": 1, "pp": 3, "ep": 1, "vpp": num_chunks, "order": "tp-cp-dp-pp"}
    assert not session.recorder.open


def test_a_pass_without_backwards_is_an_evaluation_and_names_nothing(
    monkeypatch: pytest.MonkeyPatch, hooks: Hooks
) -> None:
    schedules, session = fake_megatron.install(monkeypatch), HeardSession()
    with alone_as(1, 2):
        MegatronHooks(schedules, hooks, Works(hooks), session)
        run_pass(schedules, 4, forward_only=True)
    assert session.words == ["EVAL"]
    assert session.num_passes == 0


def test_what_runs_while_nobody_listens_still_counts(monkeypatch: pytest.MonkeyPatch, hooks: Hooks) -> None:
    schedules, session = fake_megatron.install(monkeypatch), HeardSession()

    def step(model: Any, microbatch: int) -> torch.Tensor:
        session.recorder.listening = microbatch >= 2
        return torch.zeros(2)

    with alone_as(0, 2):
        MegatronHooks(schedules, hooks, Works(hooks), session)
        session.recorder.listening = False
        run_pass(schedules, 4, step=step)
    words = fake_megatron.expected(2, 0, 4)
    assert session.words == words[words.index("0F2") + 1 :]


def test_an_error_in_the_script_leaves_no_range_open_and_the_next_pass_counts_anew(
    monkeypatch: pytest.MonkeyPatch, hooks: Hooks, lines: list[str]
) -> None:
    schedules, session = fake_megatron.install(monkeypatch), HeardSession()

    def step(model: Any, microbatch: int) -> torch.Tensor:
        if microbatch == 1:
            raise ValueError("of the script")
        return torch.zeros(2)

    with alone_as(1, 2):
        MegatronHooks(schedules, hooks, Works(hooks), session)
        with pytest.raises(ValueError, match="of the script"):
            run_pass(schedules, 4, step=step)
        assert not session.recorder.open
        session.recorder.marks.clear()
        run_pass(schedules, 4)
    assert session.words == fake_megatron.expected(2, 1, 4)
    assert lines == []


def test_shapes_that_are_sent_before_tensors_are_messages_without_a_microbatch(
    monkeypatch: pytest.MonkeyPatch, hooks: Hooks
) -> None:
    schedules, session = fake_megatron.install(monkeypatch), HeardSession()
    p2p = sys.modules["megatron.core.pipeline_parallel.p2p_communication"]

    def step(model: Any, microbatch: int) -> torch.Tensor:
        p2p._communicate_shapes(torch.zeros(2), None, recv_prev=False, recv_next=True)
        p2p._communicate_shapes(None, None, recv_prev=False, recv_next=False)
        return torch.zeros(2)

    with alone_as(1, 3):
        MegatronHooks(schedules, hooks, Works(hooks), session)
        run_pass(schedules, 3, step=step)
        p2p._communicate_shapes(torch.zeros(2), None, False, False)  # outside a pass
    assert session.words_of(ExchangeMark) == ["shape>2@24,shape<2@24"] * 3


@pytest.mark.parametrize(
    ("answer", "waits"),
    [
        (lambda recv, send: {"send_next": send, "recv_prev": recv}, [(0, ["1RECV_F1"]), (1, ["1SEND_F0"])]),
        (lambda recv, send: {"send_next": send, "recv_prev": None}, [(1, ["1SEND_F0"])]),
        (lambda recv, send: [recv, send], [(0, ["1RECV_F1"]), (1, ["1SEND_F0"])]),
        (lambda recv, send: [None, send], [(1, ["1RECV_F1", "1SEND_F0"])]),
        (lambda recv, send: [None, None], []),
        (lambda recv, send: None, []),
    ],
)
def test_a_handle_carries_its_message_and_where_there_are_fewer_the_last_one_all(
    monkeypatch: pytest.MonkeyPatch, hooks: Hooks, answer: Callable[..., Any], waits: list[tuple[int, list[str]]]
) -> None:
    schedules = fake_megatron.install(monkeypatch, [("raise NotImplementedError", "return result")])
    session, works, handles = HeardSession(), Works(hooks), [dist.Work(), dist.Work()]
    p2p = sys.modules["megatron.core.pipeline_parallel.p2p_communication"]
    vars(p2p)["result"] = answer(*handles)
    watched: list[tuple[Any, list[str]]] = []

    def watch(work: Any, carried: Any) -> None:
        watched.append((work, [str(wait.transfer.action) for wait in carried]))

    def step(model: Any, microbatch: int) -> torch.Tensor:
        if microbatch == 0:
            tensors = dict.fromkeys(("tensor_send_next", "tensor_recv_prev"), torch.zeros(2))
            none = dict.fromkeys(("tensor_send_prev", "tensor_recv_next", "group"))
            p2p._batched_p2p_ops(**tensors, **none, prev_pipeline_rank=0, next_pipeline_rank=2)
        return torch.zeros(2)

    monkeypatch.setattr(works, "watch", watch)
    with alone_as(1, 3):
        MegatronHooks(schedules, hooks, works, session)
        run_pass(schedules, 3, step=step)
    assert [(handles.index(work), actions) for work, actions in watched if work in handles] == waits


@pytest.mark.parametrize("output", [torch.zeros(2), "loss"], ids=["tensor", "no tensor"])
def test_a_backward_is_of_the_forward_whose_output_it_is_given_else_the_next_one(
    monkeypatch: pytest.MonkeyPatch, hooks: Hooks, output: Any
) -> None:
    schedules, session = fake_megatron.install(monkeypatch), HeardSession()

    def run_all(*, forward_step_func: Any, model: Any, num_microbatches: int, forward_only: bool = False) -> None:
        made = [
            schedules.forward_step(forward_step_func, None, model, num_microbatches, microbatch)[0]
            for microbatch in range(num_microbatches)
        ]
        for one in reversed(made):
            schedules.backward_step(None, one, None, None, None)

    schedules.forward_backward_no_pipelining = run_all
    with alone_as(0, 1):
        MegatronHooks(schedules, hooks, Works(hooks), session)
        schedules.forward_backward_no_pipelining(
            forward_step_func=lambda *_: copy.copy(output), model=fake_megatron.Model(), num_microbatches=2
        )
    assert session.words == ["0F0", "0F1", *(["0B0", "0B1"] if output == "loss" else ["0B1", "0B0"])]


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_forwards_that_name_no_microbatch_or_another_model_are_those_of_the_plan(
    monkeypatch: pytest.MonkeyPatch, hooks: Hooks, num_chunks: int
) -> None:
    schedules, session = fake_megatron.install(monkeypatch), HeardSession()
    with alone_as(1, 3):
        MegatronHooks(schedules, hooks, Works(hooks), session)
        hooked = schedules.forward_step
        schedules.forward_step = lambda step, data, model, count, microbatch: hooked(
            step, data, model if microbatch % 2 else None, count, None if microbatch % 3 else microbatch
        )
        run_pass(schedules, 6, num_chunks, group_size=3)
    assert session.words == fake_megatron.expected(3, 1, 6, num_chunks)


def test_messages_that_no_op_needs_have_no_action() -> None:
    run = Run(PassShape(2, 2, 2, 2), 1, ())
    received = [run.message(Kind.RECV_F) for _ in range(6)]
    assert [None if action is None else str(action) for action in received] == [
        *("1RECV_F0", "1RECV_F1", "3RECV_F0", "3RECV_F1", None, None)
    ]


def test_a_wait_is_one_range_however_often_it_is_asked_for_and_of_none_while_nobody_listens() -> None:
    session = HeardSession()
    wait = TransferWait(session.recorder, Transfer(Action(Kind.SEND_F, 0, 0), 1, 8), 0)
    for listens in (True, True, False):
        session.recorder.listening = listens
        wait.waiting()
    wait.completed()
    wait.waiting()
    assert (session.words, session.recorder.open) == (["wait 0SEND_F0"], [])


def test_outside_a_pass_nothing_is_named(hooks: Hooks) -> None:
    session = HeardSession()
    watched = WatchedPass(session, Works(hooks))
    for _ in range(2):
        watched.begin_op(Action(Kind.F, 0, 0))
        assert watched.post([Transfer(Action(Kind.SEND_F, 0, 0), 1, 8)]) is None
        with watched.exchange([Link(True, 1, 24)]):
            assert session.words == []
        watched.begin(None, 0)
        watched.end()


def test_a_forward_and_a_backward_that_overlap_are_a_pair(monkeypatch: pytest.MonkeyPatch, hooks: Hooks) -> None:
    """As ``combined_1f1b_schedule_for_no_pipelining`` calls: F0, then each forward with the backward before it."""
    schedules, session = fake_megatron.install(monkeypatch), HeardSession()
    combined = ModuleType("megatron.core.pipeline_parallel.combined_1f1b")

    def combined_forward_backward_step(
        f_model: Any, b_model: Any, b_output_tensor: Any, current_microbatch: int | None = None
    ) -> Any:
        return (torch.zeros(2) if f_model is not None else None), 0, None

    def run_all(*, forward_step_func: Any, model: Any, num_microbatches: int, forward_only: bool = False) -> None:
        step = combined.combined_forward_backward_step
        output, _, _ = step(model, None, None, current_microbatch=0)
        for microbatch in range(1, num_microbatches):
            output, _, _ = step(model, model, output, current_microbatch=microbatch)
        step(None, model, output)

    combined.combined_forward_backward_step = combined_forward_backward_step
    monkeypatch.setitem(sys.modules, combined.__name__, combined)
    schedules.forward_backward_no_pipelining = run_all
    model = fake_megatron.Model()
    model.config.overlap_moe_expert_parallel_comm = True
    with alone_as(0, 1):
        MegatronHooks(schedules, hooks, Works(hooks), session)
        schedules.forward_backward_no_pipelining(forward_step_func=None, model=model, num_microbatches=3)
    assert session.words == ["0F0", "(0F1;0B0)OVERLAP_F_B", "(0F2;0B1)OVERLAP_F_B", "0B2"]
    assert all(mark.has_phase for mark in session.recorder.marks)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("def backward_step(", "def backward_part(", "has no 'backward_step'"),
        ("output_tensor_grad, model_type", "grad, model_type", None),
        ("input_tensor, output_tensor,", "input_tensor, result,", "has no parameter 'output_tensor'"),
        ("tensor_send_prev", "send_prev", "has no parameter 'tensor_send_prev'"),
        ("def get_model_config", "def config_of", "has no 'get_model_config'"),
    ],
)
def test_a_version_that_is_not_known_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, hooks: Hooks, old: str, new: str, reason: str | None
) -> None:
    schedules = fake_megatron.install(monkeypatch, [(old, new)])
    before = dict(vars(schedules))
    works = Works(hooks)
    with alone_as(0, 2):
        if reason is None:  # a parameter that nobody reads
            MegatronHooks(schedules, hooks, works, HeardSession())
            return
        with pytest.raises(AttributeError, match=reason):
            MegatronHooks(schedules, hooks, works, HeardSession())
    assert vars(schedules) == before


def test_a_version_that_is_not_known_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    schedules = fake_megatron.install(monkeypatch, [("def forward_step(", "def forward_stage(")])
    before = dict(vars(schedules))
    adapters = Adapters(HeardSession())
    try:
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "schedules" in line]
        assert "is not a version that pptrace knows" in line
        assert "it runs without hooks" in line
        assert vars(schedules) == before
        assert line.removeprefix("pptrace: ") in adapters.facts()["notes"]
    finally:
        adapters.remove()


def test_a_hook_that_raises_takes_itself_out_and_the_pass_ends_as_without_it(
    monkeypatch: pytest.MonkeyPatch, hooks: Hooks, lines: list[str]
) -> None:
    schedules, session = fake_megatron.install(monkeypatch), HeardSession()
    with alone_as(0, 2):
        MegatronHooks(schedules, hooks, Works(hooks), session)

        def broken(*_: object) -> None:
            raise RuntimeError("no disk")

        monkeypatch.setattr(HeardSession, "describe_watched", broken)
        assert run_pass(schedules, 2) == ["loss"]
        assert run_pass(schedules, 2) == ["loss"]
    assert lines == [
        f"the hook of {WITHOUT} raised RuntimeError: no disk; it is taken out, the script goes on without it"
    ]
    assert session.words == []


def test_the_order_of_the_axes_is_what_the_script_asked_for(monkeypatch: pytest.MonkeyPatch, hooks: Hooks) -> None:
    schedules, session = fake_megatron.install(monkeypatch), HeardSession()
    state = sys.modules["megatron.core.parallel_state"]
    with alone_as(0, 2):
        watch_order(state, hooks)
        state.initialize_model_parallel(1, order="tp-cp-ep-pp-dp")
        MegatronHooks(schedules, hooks, Works(hooks), session)
        run_pass(schedules, 2)
    assert session.described[0][3]["order"] == "tp-cp-pp-dp"


def test_the_step_of_a_megatron_optimizer_is_one_step_and_gradients_are_a_span(hooks: Hooks) -> None:
    module, gradients, session = ModuleType("optimizer"), ModuleType("finalize_model_grads"), HeardSession()

    class MegatronOptimizer:
        def step(self) -> bool:
            return True

    class ChainedOptimizer(MegatronOptimizer):
        def step(self) -> bool:
            raise OverflowError

    module.MegatronOptimizer, module.ChainedOptimizer = MegatronOptimizer, ChainedOptimizer
    gradients.finalize_model_grads = lambda model: len(model)
    watch_optimizers(module, hooks, session)
    watch_gradients(gradients, hooks, session)
    assert gradients.finalize_model_grads([1, 2]) == 2
    assert MegatronOptimizer().step()
    with pytest.raises(OverflowError):
        ChainedOptimizer().step()
    assert session.words == ["GRAD_SYNC", "OPTIMIZER", "OPTIMIZER"]
    assert session.num_steps == 1
