"""``pptrace schedule`` and ``pptrace simulate`` as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pptrace.schedule.registry import SCHEDULES
from tests.support.programs import ROOT, one_line, pptrace_here


def test_the_list_names_every_schedule() -> None:
    out = pptrace_here("schedule", "list").out
    assert all(name in out for name in ("gpipe", "1f1b", "interleaved-1f1b"))


@pytest.mark.parametrize("command", [("schedule", "list"), ("simulate", "1f1b", "--pp", "4", "--microbatches", "8")])
def test_lines_of_tables_end_without_blanks(command: tuple[str, ...]) -> None:
    lines = pptrace_here(*command).out.splitlines()
    assert [line for line in lines if line.endswith(" ")] == []
    assert len(lines) > 5


def test_a_plan_is_shown_on_a_grid_of_ticks_with_its_ideal() -> None:
    out = pptrace_here("schedule", "show", "1f1b", "--pp", "2", "--microbatches", "2").out
    assert "ideal bubble ratio 0.5000" in out
    assert "rank 0 | 0F0 0F1     0B0     0B1" in out
    assert "rank 1 |     1F0 1B0 1F1 1B1" in out


def test_csv_is_torchs_with_and_without_communication() -> None:
    shape = ("--pp", "2", "--microbatches", "1", "--csv", "-")
    assert pptrace_here("schedule", "show", "1f1b", *shape).out == "0F0,0B0\n1F0,1B0\n"
    lowered = pptrace_here("schedule", "show", "1f1b", *shape, "--with-comms").out
    assert lowered == "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"


def test_a_simulation_meets_the_closed_form() -> None:
    shape = ("--pp", "4", "--microbatches", "8", "--forward", "2", "--backward", "5")
    result = json.loads(pptrace_here("simulate", "1f1b", *shape, "--json", "-").out)
    assert result["schema"] == "pptrace.simulation/1"
    assert result["makespan_ns"] == (8 + 4 - 1) * 7_000_000
    assert result["bubble_ratio"] == pytest.approx(3 / 8)
    assert [rank["peak_inflight_microbatches"] for rank in result["ranks"]] == [4, 3, 2, 1]
    assert all("ops" not in rank for rank in result["ranks"])


def test_a_csv_is_simulated_with_its_ops(tmp_path: Path) -> None:
    file = tmp_path / "handwritten.csv"
    file.write_text("0F0,,0B0\n1F0,1B0,\n", encoding="utf-8")
    result = json.loads(pptrace_here("simulate", file, "--json", "-", "--ops").out)
    assert result["schedule"] == "handwritten"
    ops = [(op["kind"], op["stage"], op["start_ns"]) for op in result["ranks"][1]["ops"]]
    assert ops == [("F", 1, 1_000_000), ("B", 1, 2_000_000)]


def test_a_picture_is_written_as_one_file(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    ended = pptrace_here("simulate", "interleaved-1f1b", "--pp", "2", "--microbatches", "4", "--html", page)
    assert ended.code == 0, ended.err
    assert '<div class="timeline" data-tiles="' in page.read_text(encoding="utf-8")


def test_a_plan_that_deadlocks_is_refused_with_its_cycle_and_the_place_marked(tmp_path: Path) -> None:
    file = tmp_path / "bad.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F1,1B0,1F0,1B1\n", encoding="utf-8")
    ended = pptrace_here("simulate", file)
    assert "deadlock: rank 1 waits at 1B0 for 1F0 on rank 1" in one_line(ended, 1)
    assert ">1B0<" in ended.out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rank,kind\n0,F\n", "row 1, cell 1: 'rank' is not an action"),
        (f"{'x' * 5000}\n", f"'{'x' * 40}…' is not an action"),
        ("0F0,1F0\n0B0\n", "stage 0 has actions on rank 0 and on rank 1"),
        ("0F0,0B0\n1F0\n", "stage 1, microbatch 0 has F; expected F and B"),
        ("", "no compute action in any of 0 rows"),
    ],
)
def test_a_csv_that_is_no_schedule_is_refused_in_one_line_that_begins_with_its_path(
    text: str, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(text, encoding="utf-8")
    for output in ((), ("--json", "-")):
        ended = pptrace_here("simulate", file, *output)
        line = one_line(ended, 1)
        assert line.startswith(f"pptrace: {file}: ")
        assert words in line
        assert len(line) < len(str(file)) + 400
    assert ended.out == ""


def test_a_csv_without_any_action_is_not_taken_for_a_schedule_with_a_wrong_cell(tmp_path: Path) -> None:
    file = tmp_path / "bad.csv"
    file.write_text("rank,kind\n0,F\n", encoding="utf-8")
    assert "tables of ops are for `pptrace analyze`" in one_line(pptrace_here("simulate", file), 1)
    file.write_text("0F0,oB0\n", encoding="utf-8")
    assert "tables of ops" not in one_line(pptrace_here("simulate", file), 1)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("schedule show nope --pp 2 --microbatches 2", 2, "'nope' is not known"),
        ("schedule show 1f1b --pp 0 --microbatches 2", 2, "pptrace: --pp is 0; expected at least 1"),
        ("simulate 1f1b --pp 2 --microbatches -1", 2, "pptrace: --microbatches is -1; expected at least 1"),
        (
            "schedule show interleaved-1f1b --pp 2 --microbatches 4 --group-size -1",
            2,
            "pptrace: --group-size is -1; expected",
        ),
        ("schedule show interleaved-1f1b --pp 6 --microbatches 8", 2, "try m=6 or 10"),
        ("schedule show 1f1b --pp 4", 2, "--microbatches"),
        ("simulate 1f1b --pp 4", 2, "--microbatches is not given"),
        ("simulate missing.csv", 1, "missing.csv"),
        (
            "simulate 1f1b --pp 2 --microbatches 2 --forward -1",
            2,
            "pptrace: --forward is -1.0; expected milliseconds, from 0",
        ),
        (
            "simulate 1f1b --pp 2 --microbatches 2 --wgrad 9",
            2,
            "pptrace: --wgrad is 9; it is a part of --backward, so expected at most 2",
        ),
        ("simulate 1f1b --pp 2 --microbatches 2 --forward nan", 2, "--forward is nan"),
        ("simulate 1f1b --pp 2 --microbatches 2 --wgrad inf", 2, "--wgrad is inf"),
        ("simulate 1f1b --pp 2 --microbatches 2 --p2p 1e300", 2, "--p2p is 1e+300"),
        ("schedule show 1f1b --pp 4 --microbatches 2000000000", 2, "expected at most 10,000,000"),
        ("nope", 2, "nope"),
    ],
)
def test_a_mistake_gets_one_line(arguments: str, code: int, words: str) -> None:
    assert words in one_line(pptrace_here(*arguments.split()), code)


def test_a_sweep_is_a_table_and_files(tmp_path: Path) -> None:
    shape = ("--sweep", "--pp", "4,8", "--microbatches", "8..32:8", "--chunks", "1,2")
    files = ("--csv", tmp_path / "points.csv", "--json", tmp_path / "points.json", "--html", tmp_path / "page.html")
    out = pptrace_here("simulate", "1f1b,interleaved-1f1b", *shape, *files).out
    assert "32 combinations: 16 simulated, 16 refused" in out
    assert "p=8: smallest bubble 0.109 (9.9% of the step), interleaved-1f1b v=2, m=32, which holds 11.5" in out
    assert len((tmp_path / "points.csv").read_text(encoding="utf-8").splitlines()) == 33
    assert len(json.loads((tmp_path / "points.json").read_text(encoding="utf-8"))["points"]) == 32
    assert "Plotly" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_sweep_over_all_schedules_names_each() -> None:
    out = pptrace_here("simulate", "all", "--sweep", "--pp", "4", "--microbatches", "8", "--csv", "-").out
    assert [line.split(",")[0] for line in out.splitlines()[1:]] == list(SCHEDULES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("1f1b --pp 4,8 --microbatches 8", "--pp is '4,8'; expected a whole number, or --sweep for several values"),
        ("1f1b,gpipe --pp 4 --microbatches 8", "several schedules make a table; add --sweep"),
        ("1f1b --pp 4 --microbatches 8 --costs-of model", "--costs-of model needs --sweep"),
        ("1f1b --sweep --pp 4", "--microbatches is not given"),
        ("nope --sweep --pp 4 --microbatches 8", "'nope' is not known"),
        ("handwritten.csv --sweep --pp 4 --microbatches 8", "a sweep takes names of the catalogue"),
        ("1f1b --sweep --pp 0,4 --microbatches 8", "--pp is 0; expected at least 1"),
        ("1f1b --sweep --pp 4 --microbatches 8..4", "--microbatches has '8..4'"),
        ("1f1b --sweep --pp 4 --microbatches 8 --lean", "--lean belongs to a single simulation"),
        ("1f1b --sweep --pp 4 --microbatches 8 --p2p -1", "--p2p is -1.0; expected milliseconds"),
        (
            "1f1b --sweep --pp 4 --microbatches 8 --backward 1,2 --wgrad 1.5",
            "--wgrad has 1.5; it is a part of --backward",
        ),
    ],
)
def test_a_mistake_in_a_sweep_gets_one_line(arguments: str, words: str) -> None:
    assert words in one_line(pptrace_here("simulate", *arguments.split()), 2)


HAND_MADE = "0F0,0F1,0B0,0B1\n1F0,1F1,1B1,1B0\n"


def test_a_plan_by_hand_is_explained_slot_by_slot(tmp_path: Path) -> None:
    """Rank 1 takes the second microbatch's backward first; rank 0 waits for the other, although it could run that one's too."""
    file = tmp_path / "handwritten.csv"
    file.write_text(HAND_MADE, encoding="utf-8")
    rows = pptrace_here("schedule", "explain", file, "--csv", "-").out.splitlines()
    assert rows == [
        "rank,from,to,runs,needs,cause,why",
        "0,0,1,0F0,,,",
        "0,1,2,0F1,,,",
        '0,2,5,,,warmup,"0B0 waits for 1B0 on rank 1, which ends at 7"',
        '0,5,7,,,order,"0B1 could have run before 0B0: its inputs are there, and it needs no more memory"',
        '0,7,9,0B0,"0F0 (rank 0, ended 1), 1B0 (rank 1, ended 7)",,',
        '0,9,11,0B1,"0F1 (rank 0, ended 2), 1B1 (rank 1, ended 5)",,',
        '1,0,1,,,fill,"1F0 waits for 0F0 on rank 0, which ends at 1"',
        '1,1,2,1F0,"0F0 (rank 0, ended 1)",,',
        '1,2,3,1F1,"0F1 (rank 0, ended 2)",,',
        '1,3,5,1B1,"1F1 (rank 1, ended 3)",,',
        '1,5,7,1B0,"1F0 (rank 1, ended 2)",,',
        "1,7,11,,,drain,has run all its actions",
    ]


def test_a_published_table_by_hand_deadlocks_and_the_page_says_where(tmp_path: Path) -> None:
    """Four ranks, two chunks, eight microbatches; a backward has two of the text's 60 slots, of which 12 are empty."""
    section = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8").split("(published-slips)=")[1]
    table = section.split("```\n")[1]
    rows = [line.split(",") for line in table.splitlines()]
    assert [60 - sum(1 + ("B" in cell) for cell in row) for row in rows] == [12] * 4
    order = [(3, "F"), (7, "F"), (7, "B"), (3, "B")]
    last = [f"{stage}{kind}{i}" for half in (range(4), range(4, 8)) for stage, kind in order for i in half]
    repaired = "".join(f"{','.join(row)}\n" for row in [*rows[:3], last])
    for name, plan in (("hand", table), ("repaired", repaired)):
        file = tmp_path / f"{name}.csv"
        file.write_text(plan, encoding="utf-8")
        refused = one_line(pptrace_here("schedule", "explain", file), 1)
        assert refused.split("deadlock: ")[1] in " ".join(section.split())


def test_the_order_that_can_run_in_its_place_takes_57_slots() -> None:
    out = pptrace_here("schedule", "explain", "interleaved-1f1b", "--pp", "4", "--microbatches", "8").out
    assert "57 slots" in out.splitlines()[0]
    (total,) = (line.split() for line in out.splitlines() if line.startswith("all"))
    assert total[-1] == "36", "9 slots of each rank"


def test_one_rank_of_an_explained_plan_is_shown_with_the_sums_of_all(tmp_path: Path) -> None:
    file = tmp_path / "handwritten.csv"
    file.write_text(HAND_MADE, encoding="utf-8")
    out = pptrace_here("schedule", "explain", file, "--rank", "1").out
    assert "handwritten: 2 ranks, 2 microbatches, 1 chunk per rank; 11 slots" in out
    assert "Rank 1" in out
    assert "Rank 0" not in out
    (total,) = (line.split() for line in out.splitlines() if line.startswith("all"))
    assert total == ["all", "1", "3", "4", "2", "10"]  # fill, warmup, drain, order, bubble
    beyond = pptrace_here("schedule", "explain", file, "--rank", "2")
    assert "--rank 2: handwritten has the ranks 0 to 1" in one_line(beyond, 2)


def test_a_sweep_in_which_every_combination_is_refused_is_wrong_usage_after_its_table() -> None:
    shape = ("gpipe,zbv", "--sweep", "--pp", "4", "--microbatches", "2,4", "--chunks", "3")
    ended = pptrace_here("simulate", *shape)
    assert "--sweep: none of 4 combinations has a plan, such as gpipe: 3 chunks" in one_line(ended, 2)
    assert "4 combinations: 0 simulated, 4 refused" in ended.out
    assert pptrace_here("simulate", *shape[:-1], "1,2").code == 0
