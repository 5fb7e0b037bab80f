"""Sequences whose lengths vary from microbatch to microbatch: trained as one process does, and every byte is predicted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from instrument.context.shard import ContextShape, shard_sequence
from instrument.data.text import Lengths, TextData
from instrument.models.gpt_config import Recompute
from pptrace.marks import Axis
from pptrace.sizes.memory import MemoryPrediction
from pptrace.sizes.step import StepVolume
from tests.instrument.models.cases.mixes import MICROBATCH_SIZE, SEQUENCE, STEPS, Mix, facts_of
from tests.instrument.models.test_mixes import check, name_of
from tests.support.pool import Pool

MIXES = (
    Mix(pp=2, tp=2, sequence=True, shortest=4, recompute=Recompute.FULL),
    Mix(pp=2, cp=2, shortest=4, schedule="interleaved-1f1b"),
    Mix(pp=2, dp=2, shortest=8, zero=1, schedule="zb-h1", clip=0.3),
    Mix(pp=2, dp=2, shortest=4, zero=3, tied=False),
    Mix(cp=4, ulysses=2, shortest=8),
)


@pytest.mark.parametrize("mix", MIXES, ids=name_of)
def test_microbatches_of_any_length_train_as_one_process_does(pool: Pool, mix: Mix) -> None:
    for rank, (outcome,) in enumerate(check(pool, [mix])):
        volume = StepVolume(facts_of(mix, STEPS), mix.shape, mix.plan, lengths=mix.lengths.of)
        predicted = [dict(volume.of_rank(rank, step)) for step in range(STEPS)]
        for of_step in predicted:
            if (receives := (Axis.PP, "recv")) in of_step:  # the call's range opens before it is known how much comes
                of_step[receives] = replace(of_step[receives], bytes=0)
        assert list(outcome.volumes) == predicted, (mix, rank)
        assert MemoryPrediction(volume, on_device=False).of_rank(rank).activations is None


def test_messages_of_a_step_have_as_many_bytes_as_its_tokens() -> None:
    """Closed form: each microbatch sends b · s · h numbers, whatever s it has."""
    lengths = Lengths(4, SEQUENCE, 4, seed=3)
    mix = Mix(pp=2, shortest=4)
    volume = StepVolume(facts_of(mix, STEPS), mix.shape, mix.plan, lengths=lengths.of)
    for step in range(20):
        tokens = sum(lengths.of(step, microbatch) for microbatch in range(mix.microbatches))
        sent = sum(calls.known_bytes or 0 for key, calls in volume.of_rank(0, step).items() if key == (Axis.PP, "send"))
        assert sent == MICROBATCH_SIZE * tokens * mix.config.hidden * 8


def test_every_length_between_the_shortest_and_the_longest_occurs_about_equally_often() -> None:
    lengths = Lengths(8, 32, 4, seed=1)
    numbers = Counter(lengths.of(step, microbatch) for step in range(100) for microbatch in range(7))
    assert sorted(numbers) == [8, 12, 16, 20, 24, 28, 32]
    assert all(60 <= number <= 140 for number in numbers.values())
    assert [Lengths(8, 8).of(step, 0) for step in range(9)] == [8] * 9


def test_replicas_draw_the_lengths_that_one_pipeline_would() -> None:
    whole, parts = (TextData(number, 2, 16, seed=5, lengths=Lengths(4, 16, 4, seed=5)) for number in (4, 2))
    of_parts = [parts.batch(3, dp_rank) for dp_rank in range(2)]
    assert whole.lengths(3, 0) == (*(of_parts[0].lengths or ()), *(of_parts[1].lengths or ()))
    for microbatch in range(4):
        part = of_parts[microbatch // 2]
        assert torch.equal(whole.batch(3, 0).tokens_of(microbatch), part.tokens_of(microbatch % 2))
        assert part.tokens_of(microbatch % 2).shape == (2, whole.lengths(3, 0)[microbatch])


def test_shards_of_short_sequences_are_of_their_own_tokens() -> None:
    tokens = torch.arange(8)[None]
    assert shard_sequence(tokens, ContextShape(2), 0).tolist() == [[0, 1, 6, 7]]
