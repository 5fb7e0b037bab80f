"""Scores of the ranks of a ring and the lengths that hide its keys, against what the documents and the runtime say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from instrument.context.shard import ContextShape, Layout, imbalance_line
from instrument.context.squares import RingPlan
from pptrace.cli.main import cli
from pptrace.sizes.context import causal_scores, hiding_chunk

SIZES = [
    *("--microbatches", "2", "--layers", "2", "--hidden", "1024", "--heads", "16", "--sequence", "512"),
    *("--vocabulary", "512", "--cp", "4"),
]
COSTS = ("--tflops", "312", "--link", "cp=300")


def test_scores_of_a_contiguous_layout_at_cp_4_are_those_known() -> None:
    assert causal_scores(512, 4, balanced=False) == (8_256, 24_640, 41_024, 57_408)
    assert causal_scores(512, 4, balanced=True) == (32_832,) * 4
    line = imbalance_line(512, ContextShape(4, 1, Layout.CONTIGUOUS))
    assert "8,256 / 24,640 / 41,024 / 57,408" in line
    assert "32,832 each" in line


def num_scores(plan: RingPlan) -> int:
    """Elements of the score matrix that a rank computes, for one head of one sequence."""
    total = 0
    for square in (plan.local, *map(plan.remote, range(1, plan.ring))):
        if square is not None:
            rows, columns = (part.stop - part.start for part in (square.queries, square.keys))
            total += rows * (rows + 1) // 2 if square.masked else rows * columns
    return total


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize(("sequence", "ring"), [(16, 2), (24, 4), (512, 8)])
def test_scores_are_those_of_the_squares_that_the_ring_computes(layout: Layout, sequence: int, ring: int) -> None:
    plans = [RingPlan(ring, rank, sequence // ring, True, layout) for rank in range(ring)]
    scores = causal_scores(sequence, ring, balanced=layout is Layout.BALANCED)
    assert tuple(map(num_scores, plans)) == scores
    assert sum(scores) == sequence * (sequence + 1) // 2


@pytest.mark.parametrize(("flops", "bandwidth"), [(312e12, 300e9), (312e12, 12.5e9), (989e12, 450e9)])
def test_a_chunk_of_flops_over_bandwidth_hides_its_keys(flops: float, bandwidth: float) -> None:
    """4 d C / B ≤ 4 d C² / F: C ≥ F / B."""
    chunk = hiding_chunk(flops / bandwidth, 2)
    assert chunk == pytest.approx(flops / bandwidth)
    width = 128
    assert 4 * width * chunk / bandwidth == pytest.approx(4 * width * chunk**2 / flops)


def test_fewer_key_heads_hide_sooner_and_half_of_the_scores_later() -> None:
    assert hiding_chunk(1000, 2, kv_share=1 / 8) == 125
    assert hiding_chunk(1000, 2, scores_share=0.5) == 2000
    of_sums = hiding_chunk(1000, 2, sum_bytes=4)
    assert of_sums == pytest.approx(1000 * 3 / 2.5)  # three times the bytes, 2.5 times the work


def estimated(*options: str) -> dict[str, Any]:
    """The command's answer as JSON."""
    given = ["estimate", "1f1b", *SIZES, *options, "--json", "-"]
    return json.loads(CliRunner().invoke(cli, given).output)


def test_estimate_says_from_which_sequence_on_a_ring_hides_its_keys() -> None:
    context = estimated(*COSTS)["context"]
    assert context["contiguous_scores"] == [8_256, 24_640, 41_024, 57_408]
    assert context["hides_forward_from"] == 4 * 2 * 1040  # causal and balanced: twice F / B
    assert context["hides_backward_from"] == 9_984  # 1.2 times as much, and 8 divides it
    shown = CliRunner().invoke(cli, ["estimate", "1f1b", *SIZES, *COSTS]).output
    assert "from 8,320 tokens a sequence on" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("more", "context"), [(["--cp-comm-type", "all_gather"], "gathered"), (["--ulysses", "4"], None)]
)
def test_gathered_keys_hide_behind_no_ring(more: list[str], context: str | None) -> None:
    known = estimated(*COSTS, *more)["context"]
    assert (known is None) == (context is None)
    assert known is None or known["hides_forward_from"] is None


def test_gathered_keys_send_what_rotating_ones_do_and_calls_fewer() -> None:
    def sent(kind: str) -> tuple[int, int]:
        rows = [row for row in estimated("--cp-comm-type", kind)["communication"] if row["axis"] == "cp"]
        keys = [row for row in rows if row["kind"] in ("send", "all_gather", "reduce_scatter")]
        return sum(row["wire_bytes"] for row in keys), sum(row["calls"] for row in keys)

    (rotating, exchanges), (gathered, calls) = sent("p2p"), sent("all_gather")
    assert rotating == gathered
    layers = microbatches = 2
    assert exchanges == layers * microbatches * (3 + 6)  # messages
    assert calls == layers * microbatches * (1 + 2)  # collectives
