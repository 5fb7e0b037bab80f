"""An encoder and its decoder: trained as one process does, with two tensors of other shapes between stages of the decoder."""

from __future__ import annotations

import pytest
import torch

from instrument.models.gpt import GptStage
from instrument.models.gpt_config import GptConfig, Recompute
from tests.instrument.models.cases.mixes import Mix
from tests.instrument.models.test_mixes import check, name_of
from tests.support.pool import Pool

MIXES = (
    Mix(pp=4, encoder=(2, 8), tied=False),
    Mix(
        pp=2,
        tp=2,
        sequence=True,
        encoder=(1, 32),
        tied=False,
        kv_heads=1,
        recompute=Recompute.FULL,
        schedule="interleaved-1f1b",
        split=(0, 2, 2, 0),
    ),
    Mix(pp=2, dp=2, zero=1, encoder=(3, 24), tied=False, schedule="zb-h1", clip=0.3, ahead=2),
    Mix(pp=2, dp=2, zero=3, encoder=(2, 8), tied=False, recompute=Recompute.SELECTIVE),
    Mix(pp=2, tp=2, encoder=(1, 8), tied=False, schedule="zbv", ahead=2),
    Mix(pp=2, encoder=(1, 8), tied=False, schedule="dualpipe"),
)


@pytest.mark.parametrize("mix", MIXES, ids=name_of)
def test_an_encoder_and_its_decoder_train_as_one_process_does(pool: Pool, mix: Mix) -> None:
    check(pool, [mix])


def test_the_encoder_sees_all_of_its_source_and_the_decoder_that_and_what_is_before_it() -> None:
    config = GptConfig(2, 8, 2, 6, dtype=torch.float64, encoder_layers=1, encoder_sequence=4)
    encoder, decoder = (GptStage(config, [layer]) for layer in range(2))
    source, tokens = torch.randint(256, (1, 4)), torch.randint(256, (1, 6))
    memory = encoder(source)
    logits = decoder(memory, decoder_tokens=tokens)
    last, later = (torch.cat([of[:, :-1], (of[:, -1:] + 1) % 256], 1) for of in (source, tokens))
    assert not torch.equal(encoder(last)[:, 0], memory[:, 0])
    assert not torch.equal(decoder(encoder(last), decoder_tokens=tokens)[:, 0], logits[:, 0])
    again = decoder(memory, decoder_tokens=later)
    assert torch.equal(again[:, :-1], logits[:, :-1])
    assert not torch.equal(again[:, -1], logits[:, -1])
