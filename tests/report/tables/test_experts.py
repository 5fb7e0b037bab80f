"""Words in the tables of experts: which experts there are, what is padding, and which way equal rows change a step."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pptrace.analysis.experts.loads import FIGURES, spread_over_layers
from pptrace.analysis.experts.show import expert_tables, late_in_most_steps
from pptrace.analysis.experts.types import (
    ExpertsReport,
    ExpertStep,
    ExpertTraffic,
    LayerLoad,
    LayerSpread,
    RankLoad,
    RoutingGain,
    TrafficPair,
)
from pptrace.model.report_table import Amount

LAYER = LayerLoad(3, 0, 0, (6, 2), 0, 1.5, 1.1, 0, 0, 0.0, 1.0, 1.0)
RANK = RankLoad(0, 0, 0, 2, 8, 1.0, 2_000, 1.0, 0, 0, 0, 64, 64, 64, flops=9_000)
EXPERTS = ExpertsReport("counts", 2, 1, (LAYER,), (RANK,), (), None, ())


def notes_of(experts: ExpertsReport) -> str:
    return "\n".join(expert_tables(experts, Amount.BRIEF)[0].notes)


def test_options_are_named_where_they_are_known() -> None:
    assert notes_of(EXPERTS).startswith("2 experts in a layer, 1 of each token\n")
    run = replace(EXPERTS, dispatcher="padded", etp=2, padding_share=0.25)
    assert "dispatcher padded; 2 ranks share each expert (etp)" in notes_of(run)
    assert "25.0% of the rows that experts compute are padding" in notes_of(run)
    assert "several numbers of experts" in notes_of(replace(EXPERTS, num_experts=None))
    assert "experts in a layer" not in notes_of(replace(EXPERTS, num_experts=None, top_k=None))


def test_reasons_stand_below_the_first_table_that_there_is() -> None:
    line = "calls do not tell how many rows they carry"
    for layers in ((LAYER,), ()):
        first, *others = expert_tables(replace(EXPERTS, layers=layers, reasons=(line,)), Amount.WHOLE)
        assert (first.notes[-1], [line in table.notes for table in others]) == (line, [False] * len(others))


def test_tokens_that_no_expert_takes_have_a_column_where_there_are_some() -> None:
    table = expert_tables(EXPERTS, Amount.WHOLE)[0]
    assert "tokens without expert" not in table.columns
    some = replace(EXPERTS, layers=(LAYER, replace(LAYER, layer=4, dropped_tokens=2, dropped_tokens_share=0.25)))
    table = expert_tables(some, Amount.WHOLE)[0]
    assert (table.columns[-1], [row[-1] for row in table.rows]) == ("tokens without expert", ["–", "25.0%"])


@pytest.mark.parametrize("amount", Amount)
def test_more_layers_than_a_screen_shows_are_summed_up(amount: Amount) -> None:
    layers = tuple(
        replace(LAYER, layer=index, expert_ratio=1 + index / 100, idle_experts=index // 50, dropped_share=index / 100)
        for index in range(61)
    )
    many = replace(EXPERTS, layers=layers, over_layers=spread_over_layers(layers))
    table = expert_tables(many, amount)[1]
    assert (table.key, table.columns) == (
        "expert-spread",
        ("of a layer", "layers", "min", "p50", "p75", "p90", "p95", "max"),
    )
    assert table.rows[:3] == (
        ("hottest expert, × mean", "61", "1.000", "1.300", "1.450", "1.540", "1.570", "1.600"),
        ("idle experts", "61", "0", "0", "0", "1", "1", "1"),
        ("dropped", "61", "0.0%", "30.0%", "45.0%", "54.0%", "57.0%", "60.0%"),
    )
    few = replace(EXPERTS, layers=layers[:12], over_layers=spread_over_layers(layers[:12]))
    assert "expert-spread" not in {table.key for table in expert_tables(few, amount)}


def test_each_figure_of_layers_has_a_name_in_tables() -> None:
    spreads = tuple(LayerSpread(figure, 13, *(1.0,) * 6) for figure in FIGURES)
    table = expert_tables(replace(EXPERTS, layers=(LAYER,) * 13, over_layers=spreads), Amount.BRIEF)[1]
    assert len({row[0] for row in table.rows}) == len(FIGURES)


def test_equal_rows_make_a_step_shorter_or_longer() -> None:
    for gain, words in ((3_000_000, "3.00 ms shorter (0.5%)"), (-3_000_000, "3.00 ms longer (0.5%)")):
        routing = RoutingGain(gain, None, None, gain / 600_000_000, 40_000_000, 10_000_000)
        notes = notes_of(replace(EXPERTS, routing=routing))
        assert words in notes
        assert "between ops for 10.00 ms, where now they are for 40.00 ms" in notes


def test_operations_are_shown_by_the_time_that_they_took() -> None:
    (row,) = expert_tables(EXPERTS, Amount.BRIEF)[1].rows
    assert "4.5 G" in row  # 9,000 in 2 µs


def late(step: int, rank: int | None, reason: str | None = None) -> ExpertStep:
    return ExpertStep(step, 8_000_000, rank, None if rank is None else 6_000_000, 0.75, reason, 1.25)


def test_the_rank_that_is_late_in_most_steps_is_named_in_the_short_text() -> None:
    steps = (late(0, 3, "rows"), late(1, 3, "rows"), late(2, 3), late(3, 1, "slow"))
    table = expert_tables(replace(EXPERTS, steps=steps), Amount.BRIEF)[1]
    line = "rank 3 is the one that others wait for most in 3 of 4 steps: its experts have most rows"
    assert table.notes[-1] == line
    unknown = ExpertStep(9, None, None, None, None, None, None)
    for others in (steps[2:], steps[:1], (late(0, 3), late(1, None)), (unknown, unknown), ()):
        assert not any(
            "wait for most" in note for note in expert_tables(replace(EXPERTS, steps=others), Amount.BRIEF)[1].notes
        )
    assert late_in_most_steps((late(0, 3), late(1, 3, "before"), late(2, 3, "before"), unknown)) == (
        "rank 3 is the one that others wait for most in 3 of 3 steps: it comes late to the layers"
    )


@pytest.mark.parametrize(
    "reasons", [("slow", None), (None, "slow"), ("slow", "rows", "before"), ("rows", None, "slow", "rows")]
)
def test_no_reason_is_given_that_is_not_that_of_most_of_these_steps(reasons: tuple[str | None, ...]) -> None:
    steps = tuple(late(number, 3, reason) for number, reason in enumerate(reasons))
    num = len(reasons)
    assert late_in_most_steps(steps) == f"rank 3 is the one that others wait for most in {num} of {num} steps"


def test_steps_and_pairs_of_ranks_are_tables_of_the_whole_report() -> None:
    pairs = (TrafficPair(0, 1, 1_200, 64_000, 0.75), TrafficPair(1, 0, 200, None, 0.5))
    traffic = ExpertTraffic("counts", 2_000, 1_500, None, 12, pairs)
    run = replace(EXPERTS, steps=(late(4, 3, "slow"), ExpertStep(5, *(None,) * 6)), traffic=traffic)
    tables = {table.key: table for table in expert_tables(run, Amount.WHOLE)}
    assert tables["expert-steps"].rows == (
        ("4", "8.00", "3", "6.00", "75.0%", "slow", "1.250"),
        ("5", "–", "–", "–", "–", "", "–"),
    )
    table = tables["expert-traffic"]
    assert table.rows == (("0", "1", "1,200", "75.0%", "64.0 KB"), ("1", "0", "200", "50.0%", "–"))
    assert table.notes[0] == "2,000 rows in forwards, by counts of the runtime; 75.0% of them go to another rank"
    assert table.notes[-1] == "the 2 pairs with most rows of 12"
    assert not {"expert-steps", "expert-traffic"} & {table.key for table in expert_tables(run, Amount.BRIEF)}
