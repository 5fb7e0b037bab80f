"""Hooks of DeepSpeed's pipeline engine on modules of its shape: they run with or without deepspeed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from instrument.adapters.deepspeed_pipe import DeepSpeedHooks
from instrument.adapters.hooks import Hooks
from instrument.adapters.install import Adapters
from instrument.adapters.works import Works
from pptrace.marks import ExchangeMark, OpMark, P2PMark, WaitMark
from pptrace.schedule import registry
from tests.adapters import fake_deepspeed
from tests.adapters.heard import HeardSession, alone_as


def watch(engine: ModuleType, hooks: Hooks, axes: dict[str, str] | None = None) -> HeardSession:
    session = HeardSession()
    DeepSpeedHooks(engine, hooks, Works(hooks), session, {} if axes is None else axes)
    return session


def messages(stage: int, num_stages: int, num_microbatches: int) -> set[str]:
    """The messages of a stage, in whichever order."""
    below = [f"{stage}RECV_F{mb}<{stage - 1}@0" for mb in range(num_microbatches)]
    below += [f"{stage}SEND_B{mb}>{stage - 1}@0" for mb in range(num_microbatches)]
    above = [f"{stage}SEND_F{mb}>{stage + 1}@0" for mb in range(num_microbatches)]
    above += [f"{stage}RECV_B{mb}<{stage + 1}@0" for mb in range(num_microbatches)]
    return {*(below if stage else []), *(above if stage < num_stages - 1 else [])}


@pytest.mark.parametrize("stage", range(4))
def test_every_op_and_message_has_its_microbatch_though_buffers_are_used_again(
    monkeypatch: pytest.MonkeyPatch, hooks: Hooks, stage: int
) -> None:
    module, axes = fake_deepspeed.install(monkeypatch), {}
    with alone_as(stage, 4):
        session = watch(module, hooks, axes)
        engine: Any = module.PipelineEngine(6)
        plan = registry.build("1f1b", 4, 6, 1)
        for step in range(2):
            session.recorder.marks.clear()
            assert engine.train_batch() == "loss"
            assert session.words_of(OpMark) == [str(action) for action in plan.compute_actions(stage)]
            posted = session.words_of(P2PMark)
            assert len(posted) == len(set(posted))
            assert set(posted) == messages(stage, 4, 6)
            shapes = [f"shape<{stage - 1}@16"] * (stage > 0) + [f"shape>{stage + 1}@16"] * (stage < 3)
            assert session.words_of(ExchangeMark) == ([] if step else shapes)
            assert session.words[-3:] == ["GRAD_SYNC", "GRAD_SYNC", "OPTIMIZER"]
            assert session.words.count("DATA") == (6 if stage in (0, 3) else 0)
        assert (session.num_passes, session.num_steps, engine.steps) == (2, 2, 2)
    mesh = {"pp": 4, "dp": 1, "tp": 1, "cp": 1, "ep": 1, "vpp": 1, "order": "tp-cp-pp-dp"}
    assert session.described == [("deepspeed", plan, [0, 1, 2, 3], mesh)]
    assert set(axes.values()) == {"pp"}
    assert not session.recorder.open


def test_a_message_of_several_tensors_is_one_and_its_wait_knows_the_bytes(
    monkeypatch: pytest.MonkeyPatch, hooks: Hooks
) -> None:
    module = fake_deepspeed.install(monkeypatch)
    with alone_as(1, 2):
        session = watch(module, hooks)
        module.PipelineEngine(2, tensors=3).train_batch()
    waits = [mark.transfer for mark in session.recorder.marks if isinstance(mark, WaitMark)]
    assert [(str(wait.action), wait.bytes) for wait in waits] == [
        ("1RECV_F0", 24),
        ("1SEND_B0", 12),
        ("1RECV_F1", 24),
        ("1SEND_B1", 12),
    ]


def test_eval_batch_is_an_evaluation_and_names_no_op(monkeypatch: pytest.MonkeyPatch, hooks: Hooks) -> None:
    module = fake_deepspeed.install(monkeypatch)
    with alone_as(1, 2):
        session = watch(module, hooks)
        module.PipelineEngine(2).eval_batch()
    assert session.words[0] == "EVAL"
    assert session.words_of(OpMark, P2PMark, ExchangeMark) == []
    assert session.num_passes == 0


def test_a_subclass_with_instructions_of_its_own_is_watched_and_what_it_copies_only_once(
    monkeypatch: pytest.MonkeyPatch, hooks: Hooks
) -> None:
    module = fake_deepspeed.install(monkeypatch)
    with alone_as(0, 2):
        session = watch(module, hooks)
        module.PipelineEngine(2).train_batch()
        session.recorder.marks.clear()
        ran: list[int] = []
        forward = next(kind for kind in module.PipelineEngine._INSTRUCTION_MAP if kind.__name__ == "ForwardPass")
        table = {**module.PipelineEngine._INSTRUCTION_MAP, forward: lambda self, buffer_id: ran.append(buffer_id)}
        type("Other", (module.PipelineEngine,), {"_INSTRUCTION_MAP": table})(2).train_batch()
    assert session.words_of(OpMark) == ["0F0", "0F1", "0B0", "0B1"]
    assert ran == [0, 1]


def test_an_error_in_the_script_leaves_no_range_open(monkeypatch: pytest.MonkeyPatch, hooks: Hooks) -> None:
    module = fake_deepspeed.install(monkeypatch)

    def fail(tensor: object, dest_stage: int) -> None:
        raise ConnectionError("a peer is gone")

    monkeypatch.setattr(module.p2p, "send", fail)
    with alone_as(0, 2):
        session = watch(module, hooks)
        with pytest.raises(ConnectionError, match="a peer is gone"):
            module.PipelineEngine(2).train_batch()
    assert not session.recorder.open


def test_a_version_that_is_not_known_stays_as_it_is_and_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = fake_deepspeed.install(monkeypatch, without=("RecvGrad",))
    before = dict(vars(module.PipelineEngine))
    adapters = Adapters(HeardSession())
    try:
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "deepspeed" in line]
        assert "is not a version that pptrace knows (PipelineEngine has no instruction 'RecvGrad')" in line
        assert dict(vars(module.PipelineEngine)) == before
    finally:
        adapters.remove()


def test_a_schedule_of_the_users_is_watched_without_a_plan(monkeypatch: pytest.MonkeyPatch, hooks: Hooks) -> None:
    module = fake_deepspeed.install(monkeypatch)
    with alone_as(0, 2):
        session = watch(module, hooks)
        engine = module.PipelineEngine(2)
        base = module.schedule.TrainSchedule
        engine._exec_schedule(type("Theirs", (base,), {"__module__": "theirs"})(2, 2, 0))
    assert session.words_of(OpMark) == ["0F0", "0F1", "0B0", "0B1"]
    assert session.described[0][1] is None


def test_removed_hooks_leave_every_instruction_as_it_was(monkeypatch: pytest.MonkeyPatch, hooks: Hooks) -> None:
    module = fake_deepspeed.install(monkeypatch)
    table = dict(module.PipelineEngine._INSTRUCTION_MAP)
    with alone_as(0, 2):
        watch(module, hooks)
        module.PipelineEngine(2).train_batch()
        assert table != module.PipelineEngine._INSTRUCTION_MAP
        hooks.remove()
    assert table == module.PipelineEngine._INSTRUCTION_MAP
