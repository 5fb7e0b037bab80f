"""Rows from rank to rank: closed forms, a reference in plain loops, ends that do not agree, hostile splits, and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import pytest

from pptrace.analysis.experts.counts import RankCounts, TokenSizes, counts_of_ranks, sizes_of_run
from pptrace.analysis.experts.exchanges import join_exchanges, no_exchanges
from pptrace.analysis.experts.traffic import SentRows, Traffic, sent_rows_of, traffic_of
from pptrace.analysis.experts.types import MOST_PAIRS, TrafficMatrix, report_traffic
from pptrace.model.tables import parse_splits, splits_by_size
from pptrace.slices import Slice
from pptrace.workflow.load import load
from tests.analysis.experts.on_paper import WIDTH, Call, counted, random_calls, tables_of
from tests.analysis.experts.test_experts import HOT, ROW_BYTES, analysed
from tests.analysis.experts.test_other_frameworks import HIDDEN, ITEM, MEGATRON, ROWS, SWITCH
from tests.support.programs import SAMPLES

GROUPS = ((0, 3, 4), (1, 2), (5, 6, 7, 8))
Tables = Mapping[int, tuple[Slice, Slice]]
Counts = Mapping[int, RankCounts]


def traffic_of_tables(tables: Tables, counts: Counts | None = None, sizes: TokenSizes | None = None) -> Traffic:
    sent: dict[int, SentRows] = {rank: sent_rows_of(*both) for rank, both in tables.items()}
    joined = join_exchanges(exchanges for exchanges, _ in tables.values())
    return traffic_of(joined, counts or {}, sent, sizes)


def cells_of(matrix: TrafficMatrix | None) -> dict[tuple[int, int], int]:
    return {(pair.source, pair.target): pair.rows for pair in matrix.pairs()}


def by_loops(calls: Sequence[Call]) -> dict[tuple[int, int], int]:
    """Rows of each pair of members in forwards, call by call."""
    cells = {(a, b): 0 for call in calls for a in call.ranks for b in call.ranks}
    for call in calls:
        for source, line in zip(call.ranks, call.rows.tolist(), strict=True):
            for target, rows in zip(call.ranks, line, strict=True):
                cells[source, target] += rows * (call.backward == 0)
    return cells


def with_splits(tables: Tables, rank: int, at: int, text: str) -> Tables:
    """The tables where a call of a rank has other splits."""
    exchanges, comms = tables[rank]
    texts = comms["splits"].copy()
    texts[at] = text
    return {**tables, rank: (exchanges, Slice({"splits": texts}))}


@pytest.mark.parametrize("seed", range(8))
def test_the_matrix_is_that_of_a_reference_in_plain_loops(seed: int) -> None:
    calls = random_calls(seed, GROUPS)
    traffic = traffic_of_tables(tables_of(calls))
    cells = by_loops(calls)
    assert cells_of(traffic.matrix) == cells
    assert traffic.reasons == ()
    assert set(traffic.matrix.groups) == set(GROUPS)
    assert (traffic.matrix.bytes == WIDTH * traffic.matrix.rows).all()
    part = report_traffic(traffic.matrix)
    assert (part.known_from, part.num_rows, part.num_pairs) == ("splits", sum(cells.values()), 6 + 2 + 12)
    away = {pair: rows for pair, rows in cells.items() if pair[0] != pair[1]}
    assert (part.away_rows, part.away_bytes) == (sum(away.values()), WIDTH * sum(away.values()))
    assert [(pair.source, pair.target) for pair in part.pairs] == sorted(away, key=lambda pair: (-away[pair], pair))
    sent = Counter[int]()
    for (source, _), rows in cells.items():
        sent[source] += rows
    assert [pair.share for pair in part.pairs] == pytest.approx([pair.rows / sent[pair.source] for pair in part.pairs])


def test_rows_of_a_column_are_those_that_the_rank_computes() -> None:
    analysis = analysed(HOT)
    experts, matrix = analysis.report.experts, analysis.expert_traffic
    assert matrix is not None
    received = {rank.rank: rank.rows for rank in experts.ranks}
    assert {rank: int(matrix.rows[matrix.target == rank].sum()) for rank in (0, 1)} == received
    sent = 3 * sum(rows // 2 for of in HOT.rows for rows in of)
    assert cells_of(matrix) == {(0, 0): sent, (0, 1): 3 * 360 - sent, (1, 0): sent, (1, 1): 3 * 360 - sent}
    assert experts.traffic.away_bytes == ROW_BYTES * experts.traffic.away_rows


def test_other_numbers_of_ranks_permute_the_matrix_alone() -> None:
    """Ranks of a group keep their order: it is that of the parts of their calls."""
    calls = random_calls(5, GROUPS)
    new = {0: 11, 3: 12, 4: 30, 1: 2, 2: 40, 5: 0, 6: 1, 7: 13, 8: 31}
    renamed = [
        Call(call.step, tuple(new[r] for r in call.ranks), call.enters, call.rows, call.backward) for call in calls
    ]
    one, other = (cells_of(traffic_of_tables(tables_of(each)).matrix) for each in (calls, renamed))
    assert other == {(new[source], new[target]): rows for (source, target), rows in one.items()}


def test_of_a_thousand_ranks_the_report_has_the_pairs_with_most_rows() -> None:
    groups = [tuple(range(first, first + 64)) for first in range(0, 1024, 64)]
    rng = np.random.default_rng(1)
    calls = [Call(0, group, np.zeros((2, 64), dtype=np.int64), rng.integers(0, 99, (64, 64))) for group in groups]
    matrix = traffic_of_tables(tables_of(calls)).matrix
    part = report_traffic(matrix)
    assert (len(matrix.rows), part.num_pairs, len(part.pairs)) == (65_536, 65_536 - 1024, MOST_PAIRS)
    assert part.num_rows == sum(int(call.rows.sum()) for call in calls)
    is_away = matrix.source != matrix.target
    assert [pair.rows for pair in part.pairs] == sorted(matrix.rows[is_away].tolist())[-MOST_PAIRS:][::-1]


def test_ends_that_do_not_agree_are_a_line() -> None:
    calls = random_calls(2, ((0, 1, 2),), steps=1)
    tables = tables_of(calls)
    text = str(tables[1][1]["splits"][2])
    sent, received = parse_splits(text)
    other = ">".join(",".join(map(str, side)) for side in (sent, (received[0] + 3, *received[1:])))
    traffic = traffic_of_tables(with_splits(tables, 1, 2, other))
    total = by_loops(calls)[0, 1]
    assert traffic.reasons == (
        "in 1 of 10 dispatches a rank received other rows than were sent to it: from rank 0 to rank 1 "
        f"{total} rows were sent, {total + 3} received",
    )
    assert cells_of(traffic.matrix) == by_loops(calls)  # what was sent


def test_ends_that_differ_in_calls_and_agree_in_all_are_a_line() -> None:
    """Rank 0 received one row more of rank 1 in the first call, and one less in the second."""
    calls = [Call(0, (0, 1), np.zeros((2, 2), dtype=np.int64), np.array([[1, 2], [3, 4]]))] * 2
    tables = tables_of(calls)
    assert traffic_of_tables(tables).reasons == ()
    tables = with_splits(with_splits(tables, 0, 0, "1,2>1,4"), 0, 1, "1,2>1,2")
    assert traffic_of_tables(tables).reasons == (
        "in 2 of 2 dispatches a rank received other rows than were sent to it",
    )


@pytest.mark.parametrize(
    "text", ["", "1,2>3", "1>2", "-1,2,3>1,2,3", "1,2,3>1,2,-3", "1,2,3", "1,2,3>4,5,6>7,8,9", "a,b,c>1,2,3", "1,,2>1,2,3",
             f"{10**30},1,2>1,2,3", "1,2,3,4>1,2,3,4", "١,1,1>1,1,1"],
)  # fmt: skip
def test_a_rank_with_damaged_splits_is_left_out_with_a_line(text: str) -> None:
    calls = random_calls(6, ((0, 1, 2), (4, 5)))
    traffic = traffic_of_tables(with_splits(tables_of(calls), 1, 0, text))
    cells = {pair: rows for pair, rows in by_loops(calls).items() if pair[0] != 1}
    assert cells_of(traffic.matrix) == cells
    assert traffic.reasons == ("rows of rank 1 are not in `traffic`: splits or members of its calls are not known",)


def test_splits_are_read_by_their_number_of_members() -> None:
    texts = ["1,2>3,4", "", "5>6", "7,8>9,10", "x", "1,2>3"]
    found = splits_by_size(texts)
    assert set(found) == {1, 2}
    places, rows = found[2]
    assert (places.tolist(), rows.tolist()) == ([0, 3], [[[1, 2], [7, 8]], [[3, 4], [9, 10]]])
    assert [part.tolist() for part in found[1]] == [[2], [[[5]], [[6]]]]


def test_ranks_without_a_trace_send_what_others_got_of_them() -> None:
    """Of three ranks the mesh tells who they are; the last one has no trace, and no call is matched."""
    calls = random_calls(7, ((0, 2, 5),))
    tables = {rank: both for rank, both in tables_of(calls).items() if rank != 5}
    alone = {
        rank: (Slice({**exchanges.columns, "out_match": np.full(len(exchanges), -1)}), comms)
        for rank, (exchanges, comms) in tables.items()
    }
    known = traffic_of_tables(alone, sizes=TokenSizes(WIDTH, "all-to-all", 1, ep_groups=((0, 2, 5),)))
    cells = {pair: rows for pair, rows in by_loops(calls).items() if pair != (5, 5)}
    assert cells_of(known.matrix) == cells
    unknown = traffic_of_tables(alone)
    assert unknown.matrix is None
    assert unknown.reasons == ("which ranks the calls of experts are of is not known: `traffic` is null",)


def test_counts_tell_where_routes_go_whatever_the_calls_carry() -> None:
    """Two ranks hold one and three of four experts, in two layers; a third one, whose other member has no counts, none."""
    kept = {0: [[1, 2, 3, 4], [5, 0, 0, 1]], 1: [[0, 7, 0, 0], [2, 2, 2, 2]]}
    counts = {rank: counted(of, (0, 4), first=rank, held=(1, 3)[rank]) for rank, of in kept.items()}
    for dispatcher, width in (("padded", None), ("all-gather", None), ("all-to-all", 64)):
        sizes = TokenSizes(64, dispatcher, 1, ep_groups=((0, 1),))
        traffic = traffic_of(no_exchanges(), counts, {}, sizes)
        assert cells_of(traffic.matrix) == {(0, 0): 6, (0, 1): 10, (1, 0): 2, (1, 1): 13}
        part = report_traffic(traffic.matrix)
        assert (part.known_from, part.num_rows, part.away_rows) == ("counts", 31, 12)
        assert part.away_bytes == (None if width is None else 12 * width)
        line = f"with the dispatcher {dispatcher} other rows travel than those that are computed: "
        line += "`away_bytes` of `traffic` is null"
        assert traffic.reasons == ((line,) if width is None else ())
    both = TokenSizes(64, "all-to-all", 1, ep_groups=((0, 1), (2, 3)))
    traffic = traffic_of(no_exchanges(), {**counts, 2: counts[0]}, {}, both)
    assert len(cells_of(traffic.matrix)) == 4
    assert traffic.reasons == (
        "rows of rank 2 are not in `traffic`: not all ranks of its group counted routes that fit",
    )


@pytest.mark.parametrize(("first", "held"), [(0, 3), (2, 2), (1, 2), (1, 4)])
def test_counts_whose_experts_do_not_fit_tell_nothing(first: int, held: int) -> None:
    counts = {0: counted([[1, 2, 3, 4]], held=1), 1: counted([[1, 2, 3, 4]], first=first, held=held)}
    assert traffic_of(no_exchanges(), counts, {}, TokenSizes(64, "padded", 1, ep_groups=((0, 1),))).matrix is None


def test_counts_of_layers_with_other_numbers_of_experts_tell_nothing() -> None:
    counts = {0: counted([[1, 2, 3, 4]], held=1), 1: counted([[1, 2, 3, 4, 5]], first=1, held=3)}
    assert traffic_of(no_exchanges(), counts, {}, TokenSizes(64, "padded", 1, ep_groups=((0, 1),))).matrix is None


def test_counts_are_taken_where_they_are_of_more_forwards_than_calls_with_splits() -> None:
    tables = tables_of([Call(0, (0, 1), np.zeros((2, 2), dtype=np.int64), np.array([[1, 2], [3, 4]]))])
    for kept, known_from, num_rows in (([[1, 2]], "splits", 10), ([[1, 2], [4, 4]], "counts", 22)):
        counts = {rank: counted(kept, first=rank, held=1) for rank in (0, 1)}
        traffic = traffic_of_tables(tables, counts)
        part = report_traffic(traffic.matrix)
        assert (part.known_from, part.num_rows) == (known_from, num_rows)
        line = "what a token takes is not among the facts of these traces: `away_bytes` of `traffic` is null"
        assert traffic.reasons == ((line,) if known_from == "counts" else ())


def test_a_rank_may_be_in_groups_of_several_sizes() -> None:
    calls = random_calls(9, ((0, 1), (0, 1, 2, 3)))
    tables = tables_of(calls)
    assert cells_of(traffic_of_tables(tables).matrix) == by_loops(calls)
    unknown = {
        rank: (Slice({**exchanges.columns, "out_bytes": np.full(len(exchanges), -1)}), comms)
        for rank, (exchanges, comms) in tables.items()
    }
    without_bytes = traffic_of_tables(unknown)
    matrix = without_bytes.matrix
    line = "of some calls the bytes of a row are not known, or differ: `away_bytes` of `traffic` is null"
    assert without_bytes.reasons == (line,)
    assert (matrix.bytes[matrix.rows > 0] == -1).all()
    assert matrix.table()["bytes"].isna().any()


def test_traces_of_other_frameworks_tell_it_by_their_splits() -> None:
    analysis = MEGATRON.analysis()
    assert cells_of(analysis.expert_traffic) == {
        (source, target): 4 * ROWS[source][target] for source in (0, 1) for target in (0, 1)
    }
    assert analysis.report.experts.traffic.away_bytes == 4 * (10 + 50) * HIDDEN * ITEM
    gathered = SWITCH.analysis()
    assert gathered.expert_traffic is None
    line = "calls do not tell how many rows go to which rank, and routes were not counted: `traffic` is null"
    assert line in gathered.report.experts.reasons


def test_counts_and_splits_of_a_recorded_run_tell_the_same() -> None:
    analysis = load([SAMPLES / "experts_pp2_ep2"])
    steps = [step.step for step in analysis.report.steps]
    counts = counts_of_ranks(analysis.facts, dict.fromkeys(range(4), steps))
    by_counts = traffic_of(no_exchanges(), counts, {}, sizes_of_run(analysis.facts.values()))
    by_splits = analysis.expert_traffic
    assert (by_counts.matrix.known_from, by_splits.known_from) == ("counts", "splits")
    pd.testing.assert_frame_equal(by_counts.matrix.table(), by_splits.table())
    assert by_counts.matrix.groups == by_splits.groups == ((0, 1), (2, 3))
