"""Sequences packed of documents: trained as one process does on each document by itself, with the bytes of whole sequences."""

from __future__ import annotations

import pytest
import torch

from instrument.data.text import Documents, TextData
from instrument.models.gpt import Block
from instrument.models.gpt_config import Recompute
from instrument.models.parallel import alone
from instrument.sequence.dropout import MicrobatchKey
from pptrace.sizes.activations import ActivationSizes
from tests.instrument.models.cases.mixes import HIDDEN, SEQUENCE, Mix, facts_of
from tests.instrument.models.test_activations import bytes_of, saved_by
from tests.instrument.models.test_mixes import check, name_of
from tests.support.pool import Pool

MIXES = (
    Mix(pp=2, tp=2, sequence=True, packed=3, kv_heads=1, schedule="interleaved-1f1b", recompute=Recompute.SELECTIVE),
    Mix(pp=2, dp=2, packed=5, zero=1, schedule="zb-h1", clip=0.3, ahead=2),
    Mix(pp=4, packed=1, recompute=Recompute.FULL),
)


@pytest.mark.parametrize("mix", MIXES, ids=name_of)
def test_packed_documents_train_as_each_by_itself_in_one_process(pool: Pool, mix: Mix) -> None:
    check(pool, [mix])


def test_documents_fill_their_sequence_and_replicas_draw_those_of_one_pipeline() -> None:
    documents = Documents(3, 16, seed=1)
    drawn = [documents.of(step, microbatch) for step in range(50) for microbatch in range(6)]
    assert all(sum(of) == 16 and min(of[:-1], default=3) >= 3 and len(of) <= documents.most for of in drawn)
    assert {len(of) for of in drawn} == {1, 2, 3, 4}
    whole, parts = (TextData(number, 2, 16, documents=documents) for number in (4, 2))
    for step in range(3):
        batch, halves = whole.batch(step, 0), [parts.batch(step, dp_rank) for dp_rank in range(2)]
        assert torch.equal(batch.tokens, torch.cat([half.tokens for half in halves]))
        assert batch.documents == (*(halves[0].documents or ()), *(halves[1].documents or ()))
        for tokens, targets, of in zip(batch.tokens, batch.targets, batch.documents or (), strict=True):
            for run, following in zip(tokens.split(list(of), 1), targets.split(list(of), 1), strict=True):
                assert torch.equal(run[:, 1:], following[:, :-1])
            ends = torch.tensor(of).cumsum(0)[:-1]
            assert (
                not len(ends) or (targets[:, ends - 1] != tokens[:, ends]).any()
            )  # the next is from elsewhere in the text


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.SELECTIVE])
def test_a_layer_keeps_the_outputs_of_its_documents_and_joins_them(recompute: Recompute) -> None:
    mix = Mix(packed=3, recompute=recompute)
    block, x = Block(mix.config, alone()), torch.randn(1, SEQUENCE, HIDDEN, dtype=torch.float64).requires_grad_()
    key = MicrobatchKey(documents=(5, 1, 10))
    sizes = ActivationSizes(facts_of(mix, 1), 1, 1, on_device=False)
    kept = saved_by(lambda: block(x, key), block)
    assert bytes_of(kept) == sizes.layer(recompute)
