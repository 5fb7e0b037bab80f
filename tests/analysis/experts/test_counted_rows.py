"""Rows of ranks by counts, where calls tell them of some ops alone."""

from __future__ import annotations

import numpy as np
import pytest

from pptrace.analysis.experts.answer import ExpertsOfRun, report_experts
from pptrace.analysis.experts.counts import RankCounts, TokenSizes, ratios_of_layer, rows_and_ratios
from pptrace.analysis.experts.exchanges import EXCHANGES, no_exchanges
from pptrace.analysis.experts.loads import layer_loads, rank_loads
from pptrace.analysis.experts.turns import forward_of_each, with_model_stages
from pptrace.analysis.experts.waits import Waits
from pptrace.sizes.expert_options import Dispatcher, ExpertOptions
from pptrace.slices import Slice
from tests.analysis.experts.on_paper import counted
from tests.support.gpt_runs import facts_of_run

LAYERS = [0, 1, 0, 1]
ROWS = {0: [30, 8, 10, 8], 1: [10, 8, 10, 24]}
"""Rank → rows of two forwards of two layers."""
GROUPS = ((0, 1),)


def counts_of(rows: dict[int, list[int]], layers: list[int] = LAYERS) -> dict[int, RankCounts]:
    routes = np.ones((len(layers), 2), dtype=np.int64)
    return {rank: counted(routes, layers, of_rank, rank, 1, step=1) for rank, of_rank in rows.items()}


def exchanges(*backward: int) -> Slice:
    """Exchanges of both ranks with the first layer, in forwards (0) and backwards (1) of one microbatch after the other."""
    columns = {name: np.zeros(2 * len(backward), dtype=np.int64) for name in EXCHANGES}
    columns["rank"], columns["backward"] = np.repeat([0, 1], len(backward)), np.tile(backward, 2)
    columns["step"][:], columns["rows"] = 1, np.repeat([30, 10], len(backward))
    columns["microbatch"] = np.tile([backward[:place].count(way) for place, way in enumerate(backward)], 2)
    columns["back_end_ns"] = columns["out_end_ns"] = np.tile(np.arange(len(backward)), 2)
    return with_model_stages(Slice(columns), None)


def test_rows_are_those_of_all_forwards_where_calls_tell_of_some() -> None:
    sizes = TokenSizes(64, "all-to-all", 1, ep_groups=GROUPS)
    ranks = rank_loads(Waits(exchanges(0, 1)), counts_of(ROWS), sizes)
    assert [rank.rows for rank in ranks] == [56, 52]
    assert [rank.ratio for rank in ranks] == pytest.approx([56 / 54, 52 / 54])
    assert [rank.rows for rank in rank_loads(Waits(exchanges(0, 1)), counts_of(ROWS), None)] == [30, 10]


def test_the_ratio_of_a_layer_is_that_of_its_forwards() -> None:
    assert ratios_of_layer(GROUPS, counts_of(ROWS), 0) == pytest.approx([1.5, 1.0])
    (alone,) = [load for load in layer_loads(exchanges(), counts_of(ROWS), GROUPS) if load.layer == 1]
    assert (alone.rank_ratio, alone.worst_rank_ratio) == pytest.approx((1.25, 1.5))


def test_ranks_with_other_forwards_or_without_counts_are_not_compared() -> None:
    other = counts_of({0: ROWS[0]}) | counts_of({1: ROWS[1]}, [0, 0, 0, 1])
    for counts in (other, counts_of({0: ROWS[0]}), {}):
        assert rows_and_ratios(GROUPS, counts) == {}
    assert ratios_of_layer(GROUPS, other, 1) is None
    assert rows_and_ratios(((0,), (1,)), counts_of(ROWS)) == {}  # a rank that has all experts
    counts = {rank + 2: of_rank for rank, of_rank in counts_of(ROWS).items()}
    assert rows_and_ratios(((0, 1), (2, 3)), counts) == {2: (56, 56 / 54), 3: (52, 52 / 54)}


@pytest.mark.parametrize(("layers", "forward"), [(LAYERS, [0, 1, 2, 3]), ([0, 0, 0, 1], [-1] * 4)])
def test_an_exchange_is_of_a_counted_forward_where_all_layers_are_those_that_were_counted(
    layers: list[int], forward: list[int]
) -> None:
    columns = {"layer": np.tile(LAYERS, 2), "microbatch": np.tile([0, 0, 1, 1], 2)}
    two_layers = Slice({**exchanges(0, 0, 0, 0).columns, **columns})
    assert forward_of_each(two_layers, counts_of(ROWS, layers)).tolist() == forward * 2


def test_rows_in_flight_are_not_known_where_the_calls_of_a_backward_are_not() -> None:
    assert [rank.in_flight_rows for rank in rank_loads(Waits(exchanges(0, 1)), {}, None)] == [30, 10]
    assert [rank.in_flight_rows for rank in rank_loads(Waits(exchanges(0)), {}, None)] == [None, None]


def test_padding_is_that_of_ranks_whose_tokens_were_all_counted() -> None:
    facts = {0: facts_of_run(ExpertOptions(2, dispatcher=Dispatcher.PADDED), {"dp": 2, "ep": 2})}
    whole, part = (
        report_experts(ExpertsOfRun(exchanges(0, 1), counts_of(rows)), (), facts) for rows in (ROWS, {0: ROWS[0]})
    )
    assert whole.padding_share == pytest.approx(1 - 2 * 4 * 2 / (56 + 52))
    assert part.padding_share is None
    line = "no counts of rank 1: routes of experts are those of the other ranks' tokens"
    assert (line in part.reasons, line in whole.reasons) == (True, False)


def reasons_of(exchanges: Slice, counts: dict[int, RankCounts], etp: int = 1) -> str:
    facts = {0: facts_of_run(ExpertOptions(2), {"dp": 2 * etp, "ep": 2, "etp": etp})}
    report = report_experts(ExpertsOfRun(exchanges, counts), (), facts)
    return "\n".join(report.reasons)


def test_figures_that_are_null_have_a_line() -> None:
    """Of two forwards and backwards of a layer one runs again; then backwards are left out."""
    counts = counts_of({0: [30, 30], 1: [10, 10]}, [0, 0])
    whole = exchanges(0, 0, 1, 1)
    assert "`predicted_bytes`" not in reasons_of(whole, counts)
    assert "`in_flight_rows`" not in reasons_of(whole, counts)
    again = exchanges(0, 0, 0, 1, 1)
    again.columns["again"][[2, 7]], again.columns["microbatch"][[2, 7]] = 1, 0
    assert not any(f"`{name}`" in reasons_of(again, counts) for name in ("predicted_bytes", "flops", "in_flight_rows"))
    lost = reasons_of(exchanges(0, 0, 1), counts)
    assert "the calls, or those of their backward, are not known: `predicted_bytes` and `flops` are null" in lost
    assert "some backwards have no known calls: `in_flight_rows` is null" in lost
    forwards = reasons_of(exchanges(0, 0), counts)
    assert "no calls of backwards are known: `flops` is null" in forwards
    assert "`predicted_bytes`" not in forwards
    shared = reasons_of(whole, {0: counts[0]}, etp=2)
    assert "not all ranks that share experts counted routes: `predicted_bytes` of some is null" in shared
    assert "`flops`" not in shared


def test_calls_of_forwards_that_ran_again_are_no_overlapped_pairs() -> None:
    """The first forward of rank 0 and 1 was taken back with its update, and ran again: its op does not count."""
    columns = {**exchanges(0, 0, 1).columns, "layer": np.tile([-1, 0, 0], 2), "microbatch": np.tile([-1, 0, 0], 2)}
    columns["backward"] = columns["op_output"] = np.tile([-1, 0, 1], 2)
    reasons = reasons_of(Slice(columns), counts_of({0: [30, 30], 1: [10, 10]}, [0, 0]))
    assert "some calls are in no op that counts" in reasons
    assert "of their ranks `in_flight_rows`" in reasons
    assert "overlapped pairs" not in reasons
    assert "equally many exchanges" not in reasons


def test_waits_along_etp_are_mentioned_where_ranks_share_experts() -> None:
    counts = counts_of(ROWS)
    alone, shared = (reasons_of(with_model_stages(no_exchanges(), None), counts, etp) for etp in (1, 2))
    assert "no calls along ep" in alone
    assert ("along etp" in alone, "along etp" in shared) == (False, True)


def test_rows_that_counts_tell_and_calls_do_not_are_no_unknown_loads() -> None:
    columns = {**exchanges(0, 0, 1).columns, "rows": np.full(6, -1)}
    unknown = Slice(columns)
    assert "loads of ranks" in reasons_of(unknown, {})
    counted = reasons_of(unknown, counts_of({0: [30], 1: [10]}, [0]))
    assert "loads of ranks" not in counted
    assert "and so not its rows: slowness and what unequal routes cost are null" in counted
