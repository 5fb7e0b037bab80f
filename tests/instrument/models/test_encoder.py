"""An encoder and its decoder: trained as one process does, with two tensors of other shapes between stages of the decoder."""

from __future__ import annotations

import pytest

from instrument.models.gpt import Recompute
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
