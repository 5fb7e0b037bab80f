"""Hooks of DeepSeek's DualPipe on modules of its shape: they run with or without dualpipe."""

from __future__ import annotations

import pytest
import torch

from instrument.adapters.dualpipe import MODULES, DualPipeHooks
from instrument.adapters.hooks import Hooks
from instrument.adapters.works import Works
from pptrace.marks import OpMark, P2PMark
from pptrace.schedule import registry
from pptrace.schedule.lower import lower
from pptrace.schedule.messages import peer_of
from tests.adapters.fake_dualpipe import module_of
from tests.adapters.heard import HeardSession, alone_as

PP, MICROBATCHES = 4, 10


@pytest.mark.parametrize("mapping", [None, [2, 0, 3, 1]])
@pytest.mark.parametrize("rank", range(PP))
@pytest.mark.parametrize("name", MODULES)
def test_every_op_and_message_is_that_of_the_plan(
    hooks: Hooks, name: str, rank: int, mapping: list[int] | None
) -> None:
    module, session = module_of(name), HeardSession()
    kind, schedule = MODULES[name]
    plan = registry.build(schedule, PP, MICROBATCHES, 2)
    ranks = list(range(PP)) if mapping is None else [mapping.index(place) for place in range(PP)]
    with alone_as(ranks[rank], PP):
        DualPipeHooks(module, hooks, Works(hooks), session)
        pipeline = getattr(module, kind)(None, rank_mapping=mapping)
        for _ in range(2):
            session.recorder.marks.clear()
            assert pipeline.step(num_chunks=MICROBATCHES) == "loss"
            assert session.words_of(OpMark) == [str(action) for action in plan.compute_actions(rank)]
            posted = [word for words in session.words_of(P2PMark) for word in words.split(",")]
            expected = [action for action in lower(plan).ranks[rank] if not action.kind.is_compute]
            assert sorted(posted) == sorted(
                f"{action}{'>' if action.kind.is_send else '<'}{ranks[peer_of(plan, action)]}@20" for action in expected
            )
    assert session.num_passes == 2
    assert session.described == [("deepseek", plan, ranks, {})]
    assert not session.recorder.open


@pytest.mark.parametrize("name", MODULES)
def test_a_pass_without_gradients_is_an_evaluation_and_names_no_op(hooks: Hooks, name: str) -> None:
    module, session = module_of(name), HeardSession()
    with alone_as(1, PP), torch.no_grad():
        DualPipeHooks(module, hooks, Works(hooks), session)
        getattr(module, MODULES[name][0])().step(num_chunks=MICROBATCHES)
    assert (session.words, session.num_passes) == (["EVAL"], 0)
    assert not session.recorder.open


def test_a_pipeline_of_another_shape_is_not_watched(hooks: Hooks) -> None:
    module = module_of("dualpipe.dualpipe", without="_weight_chunk")
    with pytest.raises(AttributeError, match="DualPipe has no '_weight_chunk'"):
        DualPipeHooks(module, hooks, Works(hooks), HeardSession())
    assert not hasattr(module.DualPipe.step, "__wrapped__")


def test_a_pass_that_fails_leaves_nothing_to_the_next_one(hooks: Hooks, monkeypatch: pytest.MonkeyPatch) -> None:
    module, session = module_of("dualpipe.dualpipev"), HeardSession()
    plan = registry.build("dualpipe-v", PP, MICROBATCHES, 2)
    with alone_as(0, PP):
        DualPipeHooks(module, hooks, Works(hooks), session)
        pipeline = module.DualPipeV()
        monkeypatch.setattr(module.DualPipeV, "_send_backward", raise_connection_error)
        with pytest.raises(ConnectionError, match="a peer is gone"):
            pipeline.step(num_chunks=MICROBATCHES)
        monkeypatch.undo()
        pipeline.comm_ops = []
        assert not session.recorder.open
        session.recorder.marks.clear()
        pipeline.step(num_chunks=MICROBATCHES)
    assert session.words_of(OpMark) == [str(action) for action in plan.compute_actions(0)]


def raise_connection_error(*_: object) -> None:
    raise ConnectionError("a peer is gone")
