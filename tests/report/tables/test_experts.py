"""Words in the tables of experts: which experts there are, what is padding, and which way equal rows change a step."""

from __future__ import annotations

from dataclasses import replace

from pptrace.analysis.expert_parts import ExpertsReport, LayerLoad, RankLoad, RoutingGain
from pptrace.report.tables.experts import expert_tables
from pptrace.report.tables.table import Amount

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


def test_tokens_that_no_expert_takes_have_a_column_where_there_are_some() -> None:
    table = expert_tables(EXPERTS, Amount.WHOLE)[0]
    assert "tokens without expert" not in table.columns
    some = replace(EXPERTS, layers=(LAYER, replace(LAYER, layer=4, dropped_tokens=2, dropped_tokens_share=0.25)))
    table = expert_tables(some, Amount.WHOLE)[0]
    assert (table.columns[-1], [row[-1] for row in table.rows]) == ("tokens without expert", ["–", "25.0%"])


def test_equal_rows_make_a_step_shorter_or_longer() -> None:
    for gain, words in ((3_000_000, "3.00 ms shorter (0.5%)"), (-3_000_000, "3.00 ms longer (0.5%)")):
        routing = RoutingGain(gain, None, None, gain / 600_000_000, 40_000_000, 10_000_000)
        notes = notes_of(replace(EXPERTS, routing=routing))
        assert words in notes
        assert "between ops for 10.00 ms, where now they are for 40.00 ms" in notes


def test_operations_are_shown_by_the_time_that_they_took() -> None:
    (row,) = expert_tables(EXPERTS, Amount.BRIEF)[1].rows
    assert "4.5 G" in row  # 9,000 in 2 µs
