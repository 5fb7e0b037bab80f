"""Predicted communication in closed form: the field's formulas, and sums over a step worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from instrument.mesh import MeshShape
from pptrace.schedule.registry import build
from pptrace.sizes.gpt_facts import Parameter
from pptrace.sizes.step import StepVolume
from pptrace.sizes.transformer import (
    AttentionSizes,
    BothWays,
    Calls,
    TensorSizes,
    Volume,
    attention_again_volume,
    attention_volume,
    column_volume,
    cross_entropy_volume,
    pair_volume,
    ring_step_bytes,
    ring_volume,
    row_volume,
    times,
    total,
    ulysses_elements,
    ulysses_volume,
)
from tests.support.gpt_runs import facts, step_of

WIRE = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Bytes on the wire of a ring algorithm, in (n − 1)/n of the whole tensor (nccl-tests)."""


def wire_bytes(volume: Volume, size: int) -> int:
    collectives = sum(WIRE[kind] * calls.bytes for (_, kind), calls in volume.items() if kind in WIRE)
    return collectives * (size - 1) // size + sum(c.bytes for (_, kind), c in volume.items() if kind == "send")


def tensor_volume(sizes: TensorSizes) -> BothWays:
    """A transformer layer's two pairs of a column and a row layer."""
    pair = pair_volume(sizes)
    return BothWays(times(pair.forward, 2), times(pair.backward, 2))


@pytest.mark.parametrize("tp", [2, 4])
def test_a_layer_has_four_all_reduces_of_its_activations(tp: int) -> None:
    layer = tensor_volume(TensorSizes(tp, 1024, sequence_parallel=False, overlap=False))
    assert layer.forward == layer.backward == {("tp", "all_reduce"): Calls(2, 2 * 1024)}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_sequence_parallelism_moves_the_same_bytes_and_gathers_two_inputs_again(tp: int, overlap: bool) -> None:
    plain = tensor_volume(TensorSizes(tp, 1024, sequence_parallel=False, overlap=False))
    cut = tensor_volume(TensorSizes(tp, 1024, sequence_parallel=True, overlap=overlap))
    again = 2 * 1024 * (tp - 1) // tp
    assert wire_bytes(cut.forward, tp) == wire_bytes(plain.forward, tp)
    assert wire_bytes(cut.backward, tp) == wire_bytes(plain.backward, tp) + again
    if not overlap:
        both = total((cut.forward, cut.backward))
        assert both == {("tp", "all_gather"): Calls(6, 6 * 1024), ("tp", "reduce_scatter"): Calls(4, 4 * 1024)}
    else:
        steps = 2 * (tp - 1)
        assert cut.forward[("tp", "send")] == cut.forward[("tp", "recv")] == Calls(2 * steps, 2 * steps * 1024 // tp)


def test_one_rank_of_tp_communicates_nothing() -> None:
    sizes = TensorSizes(1, 1024, sequence_parallel=True, overlap=True)
    for part in (tensor_volume(sizes), column_volume(sizes), row_volume(sizes)):
        assert not part.forward
        assert not part.backward
    assert cross_entropy_volume(1, tokens=5, number_bytes=4) == {}


def test_the_cross_entropy_exchanges_three_numbers_a_token() -> None:
    assert cross_entropy_volume(4, tokens=5, number_bytes=4) == {("tp", "all_reduce"): Calls(2, 3 * 5 * 4)}


def test_context_volumes_are_the_formulas_of_the_field() -> None:
    assert ulysses_elements(sequence=1024, hidden=64, size=4) == 8 * 1024 * 64 // 4
    assert ring_step_bytes(chunk=256, hidden=64) == 4 * 256 * 64
    sizes = AttentionSizes(microbatch=3, sequence=1024, heads=8, kv_heads=8, head_dim=8, item_bytes=2)
    to_all = ulysses_volume(replace(sizes, ulysses=4))
    assert sum(c.bytes for way in (to_all.forward, to_all.backward) for c in way.values()) == 3 * 8 * 1024 * 64 // 4 * 2
    ring = ring_volume(replace(sizes, ring=4))
    assert ring.forward[("cp", "send")] == Calls(3, 3 * 3 * 4 * 256 * 64)
    # k and v again, and their gradients in float32
    assert ring.backward[("cp", "recv")] == Calls(6, 3 * ring.forward[("cp", "send")].bytes)
    assert attention_volume(sizes).forward == attention_volume(sizes).backward == {}


def test_selective_recompute_does_not_bring_the_output_back() -> None:
    sizes = AttentionSizes(3, 1024, heads=8, kv_heads=2, head_dim=8, item_bytes=2, ring=2, ulysses=4)
    whole, again = attention_volume(sizes).forward, attention_again_volume(sizes)
    assert again[("cp", "send")] == whole[("cp", "send")]
    output = 3 * (1024 // 8) * 8 * 8 * 2  # microbatch, positions of a rank, heads, head dim, bytes
    key = ("cp", "all_to_all")
    assert (again[key].count, again[key].bytes) == (whole[key].count - 1, whole[key].bytes - output)


def test_transfers_are_activations_of_every_microbatch_in_both_directions() -> None:
    num_bytes = 2 * 16 * 32 * 4
    first, *middle, last = step_of(facts(layers_per_stage=(1, 1, 1, 1)), MeshShape(pp=4))
    assert first == last == {("pp", "send"): Calls(4, 4 * num_bytes), ("pp", "recv"): Calls(4, 4 * num_bytes)}
    for rank in middle:
        assert rank == {("pp", "send"): Calls(8, 8 * num_bytes), ("pp", "recv"): Calls(8, 8 * num_bytes)}


def test_with_sequence_and_context_parallelism_shards_travel() -> None:
    cut = facts(layers_per_stage=(2, 2), sequence_parallel=True)
    for rank in step_of(cut, MeshShape(pp=2, tp=2, cp=2)):
        assert rank[("pp", "send")] == Calls(4, 4 * 2 * (16 // 2 // 2) * 32 * 4)


def test_replicas_average_every_gradient_and_the_loss() -> None:
    h, layers, vocabulary, sequence = 32, 4, 256, 16
    parameters = layers * (12 * h * h + 13 * h) + vocabulary * h + sequence * h + 2 * h
    for tied, numbers in ((True, parameters), (False, parameters + vocabulary * h)):
        for rank in step_of(facts(tied=tied), MeshShape(1, dp=3)):
            assert rank == {("dp", "all_reduce"): Calls(2, (numbers + 1) * 4)}


def test_zero_1_moves_as_much_as_an_all_reduce_and_zero_3_gathers_for_every_pass() -> None:
    (plain, *_), (sharded, *_), (whole, *_) = (step_of(facts(zero=zero), MeshShape(1, dp=4)) for zero in (0, 1, 3))
    loss = 4
    gradients = plain[("dp", "all_reduce")].bytes - loss
    for kind in ("reduce_scatter", "all_gather"):
        assert sharded[("dp", kind)] == Calls(1, gradients)
    assert whole[("dp", "reduce_scatter")] == Calls(5, gradients)  # a unit for each layer, and one for all else
    assert whole[("dp", "all_gather")] == Calls(5 * 4 * 2, 4 * 2 * gradients)  # microbatches, forward and backward


def test_rows_that_replicas_do_not_divide_are_padded() -> None:
    parameter = Parameter((7, 5))
    assert [parameter.local_numel(rank, 4) for rank in range(4)] == [10, 10, 10, 5]
    assert parameter.padded_numel(4) == 40
    assert Parameter((2, 5)).local_numel(3, 4) == 0


def test_parts_of_gradients_are_summed_over_tp_once() -> None:
    plain, cut = (step_of(facts(sequence_parallel=shards), MeshShape(1, tp=2))[0] for shards in (False, True))
    whole_on_every_rank = 4 * 6 * 32 + 2 * 32 + 16 * 32  # norms and two biases of a layer, last norm, positions
    assert cut[("tp", "all_reduce")].bytes == whole_on_every_rank * 4 + 4 * 3 * 2 * 16 * 4  # and the cross-entropies
    assert plain[("tp", "all_reduce")].count == 4 * (4 * 4 + 2 + 2)  # layers, embedding and head, cross-entropy


@pytest.mark.parametrize("dp", [2, 3])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_replicas_that_hold_a_share_of_the_gradients_sum_that_share_over_tp(zero: int, dp: int) -> None:
    """From ZeRO-2 on the shares make up the whole once; before, each replica holds it."""
    ranks = step_of(facts(sequence_parallel=True, zero=zero), MeshShape(1, tp=2, dp=dp))
    whole_on_every_rank = 4 * 6 * 32 + 2 * 32 + 16 * 32  # norms and two biases of a layer, last norm, positions
    cross_entropies = 4 * 3 * 2 * 16 * 4  # of each rank
    times_held = 1 if zero >= 2 else dp
    over_tp = sum(rank[("tp", "all_reduce")].bytes - cross_entropies for rank in ranks)
    assert over_tp == 2 * times_held * whole_on_every_rank * 4, "on both ranks of tp"


def test_a_tied_embedding_is_summed_over_both_ends() -> None:
    ends = step_of(facts(tied=True, layers_per_stage=(1, 1, 2)), MeshShape(pp=3))
    assert [rank.get(("embd", "all_reduce")) for rank in ends] == [Calls(1, 256 * 32 * 4), None, Calls(1, 256 * 32 * 4)]
    ends = step_of(facts(tied=True, layers_per_stage=(2, 2)), MeshShape(pp=2))
    assert [rank[("embd", "all_reduce")] for rank in ends] == [Calls(1, 256 * 32 * 4)] * 2


def test_a_tied_embedding_with_both_ends_on_a_rank_is_summed_there() -> None:
    """On a V the first rank has the first and the last stage."""
    shape = StepVolume(facts(tied=True, layers_per_stage=(1, 1, 1, 1)), MeshShape(pp=2), build("zbv", 2, 4))
    assert all(("embd", "all_reduce") not in shape.of_rank(rank, 3) for rank in (0, 1))
    tied, two = (
        StepVolume(facts(tied=tied, layers_per_stage=(1, 1, 1, 1)), MeshShape(pp=2, dp=2), build("zbv", 2, 4)).of_rank(
            0, 3
        )
        for tied in (True, False)
    )
    assert two[("dp", "all_reduce")].bytes - tied[("dp", "all_reduce")].bytes == 256 * 32 * 4, (
        "the replicas average it once"
    )


def test_partly_recomputed_microbatches_repeat_their_forward() -> None:
    none, part, full = (
        step_of(facts(**changes), MeshShape(1, tp=2))[0][("tp", "all_reduce")].count
        for changes in ({}, {"recompute_microbatches_beyond": 0}, {"recompute": "full"})
    )
    assert full == none + 4 * 4 * 2
    assert part == full  # one microbatch is in flight, and none may keep its activations
