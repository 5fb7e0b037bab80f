"""CSV as torch reads and writes it, and the grid for people."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from pptrace.errors import ScheduleError
from pptrace.schedule.drawing import draw
from pptrace.schedule.lower import lower
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from pptrace.schedule.text import from_csv, from_rows, read_csv, to_csv, to_rows
from pptrace.schedule.validate import validate
from tests.schedule import torch_tables
from tests.schedule.shapes import plans

SHAPES = [("gpipe", 1, 1, 1), ("gpipe", 3, 4, 1), ("1f1b", 4, 8, 1), ("1f1b", 4, 4, 1), ("interleaved-1f1b", 4, 8, 3)]


def torch_runtime(plan: Plan) -> torch_schedules._PipelineScheduleRuntime:
    """torch's runtime for a plan of the same size, without a table as yet."""
    stages = [torch_tables.StubStage(stage, plan.pp, plan.num_stages) for stage in plan.stages_of(0)]
    return torch_schedules._PipelineScheduleRuntime(stages, plan.num_microbatches)


@given(plans(), st.booleans())
def test_a_plan_survives_csv(plan: Plan, with_comms: bool) -> None:
    plan = lower(plan) if with_comms else plan
    read = from_csv(to_csv(plan))
    for of_read, of_plan in zip(read.ranks, plan.ranks, strict=True):
        halves = [[(half.key, half.chunk) for a in row for half in (a, *a.parts)] for row in (of_read, of_plan)]
        assert halves[0] == halves[1]
    assert (read.placement, read.num_microbatches) == (plan.placement, plan.num_microbatches)
    assert read.num_chains == plan.num_chains
    assert to_csv(read) == to_csv(plan)
    validate(read)


@pytest.mark.parametrize("shape", SHAPES)
def test_torch_loads_and_simulates_the_csv_of_a_lowered_plan(shape: tuple[str, int, int, int], tmp_path: Path) -> None:
    """torch's dry run finds missing and misordered messages; it must use up every action."""
    plan = lower(build(*shape))
    (tmp_path / "plan.csv").write_text(to_csv(plan))
    runtime = torch_runtime(plan)
    runtime._load_csv(str(tmp_path / "plan.csv"), format="compute_comms")
    assert torch_tables.text_rows(runtime.pipeline_order_with_comms) == to_rows(plan)
    ran = runtime._simulate()
    assert [[cell for cell in row if cell] for row in torch_tables.text_rows(ran)] == to_rows(plan)


@pytest.mark.parametrize("shape", SHAPES)
def test_torch_loads_the_csv_of_a_plan_and_dumps_it_byte_for_byte(
    shape: tuple[str, int, int, int], tmp_path: Path
) -> None:
    plan = build(*shape)
    (tmp_path / "plan.csv").write_text(to_csv(plan))
    runtime = torch_runtime(plan)
    runtime._load_csv(str(tmp_path / "plan.csv"))
    assert torch_tables.text_rows(runtime.pipeline_order) == to_rows(plan)
    runtime._dump_csv(str(tmp_path / "dump.csv"), format="compute_only")
    assert (tmp_path / "dump.csv").read_bytes().replace(b"\r\n", b"\n") == to_csv(plan).encode()


def test_every_cell_of_a_lowered_plan_is_an_action_of_torch() -> None:
    for shape in SHAPES:
        plan = lower(build(*shape))
        torch_actions = {
            rank: [torch_schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(to_rows(plan))
        }
        assert torch_tables.text_rows(torch_actions) == to_rows(plan)
        stage_to_rank = torch_schedules._validate_schedule(
            torch_actions, plan.pp, plan.num_stages, plan.num_microbatches
        )
        assert [stage_to_rank[stage] for stage in range(plan.num_stages)] == list(plan.placement)


MULTI_STAGE = [
    *(("ScheduleInterleaved1F1B", 2), ("ScheduleInterleaved1F1B", 4), ("ScheduleLoopedBFS", 2)),
    *(("ScheduleInterleavedZeroBubble", 2), ("ScheduleZBVZeroBubble", 2), ("ScheduleDualPipeV", 2)),
]


@pytest.mark.parametrize(("name", "chunks"), MULTI_STAGE)
def test_the_compute_tables_of_torch_are_read_with_their_empty_cells_and_are_sound(
    name: str, chunks: int, tmp_path: Path
) -> None:
    schedule = torch_tables.multi(getattr(torch_schedules, name), 4, 8, chunks)
    schedule._dump_csv(str(tmp_path / f"{name}.csv"), format="compute_only")
    plan = read_csv(tmp_path / f"{name}.csv")
    cells = torch_tables.text_rows(schedule.pipeline_order)
    assert to_rows(plan) == [[cell for cell in row if cell] for row in cells]
    assert (plan.pp, plan.num_stages, plan.num_microbatches, plan.name) == (4, 4 * chunks, 8, name)
    validate(plan)


@pytest.mark.parametrize(("name", "chunks"), MULTI_STAGE)
def test_the_tables_of_torch_with_sends_and_gathers_are_read(name: str, chunks: int, tmp_path: Path) -> None:
    """They unshard a stage's parameters more than once, which is no mistake."""
    schedule = torch_tables.multi(getattr(torch_schedules, name), 4, 8, chunks)
    schedule._dump_csv(str(tmp_path / "comms.csv"), format="compute_comms")
    plan = read_csv(tmp_path / "comms.csv")
    assert plan.has_comms
    assert to_rows(plan) == torch_tables.text_rows(schedule.pipeline_order_with_comms)
    validate(plan.compute_only())


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_the_interleaved_plan_of_torch_with_its_sends_is_sound(chunks: int) -> None:
    schedule = torch_tables.multi(torch_schedules.ScheduleInterleaved1F1B, 4, 8, chunks)
    plan = from_rows(torch_tables.text_rows(schedule.pipeline_order_with_comms), "torch")
    assert chunks < 4 or sum(str(action) == "0UNSHARD" for action in plan.ranks[0]) > 1
    validate(plan)


def test_empty_cells_blank_lines_and_spaces_around_cells_are_read_over() -> None:
    plan = from_csv(",0F0,,0B0\n , 1F0 ,1B0,\n\n\r\n")
    assert to_rows(plan) == [["0F0", "0B0"], ["1F0", "1B0"]]


def test_quoted_cells_and_windows_line_ends_are_read() -> None:
    assert to_rows(from_csv('"0F0",0B0\r\n1F0,"1B0"\r\n')) == [["0F0", "0B0"], ["1F0", "1B0"]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0F0xyz\n1F0,1B0", "p.csv: row 1, cell 2: '0F0xyz' is not an action"),
        ("0F0,0B0\n,,1 F0", "p.csv: row 2, cell 3: '1 F0' is not an action"),
        ("", "no compute action in any of 0 rows; expected cells such as '0F0'"),
        ("0UNSHARD\n1UNSHARD", "no compute action in any of 2 rows"),
        ("0F0,0B0\n2F0,2B0", "stage 1 has no action though stage 2 has; number from 0"),
        ("0F1,0B1", "microbatch 0 has no action though microbatch 1 has; number from 0"),
        ("0F999999999,0B999999999", "microbatch 0 has no action though microbatch 999999999 has"),
        ("0F0,0B0,999999999F0", "stage 1 has no action though stage 999999999 has"),
        ("0F0,0B0\n0F1,0B1", "stage 0 has actions on rank 0 and on rank 1; a stage belongs to one rank"),
        ("0F0," + "x" * 200_000, "is not CSV (field larger than field limit"),
    ],
)
def test_what_is_no_plan_is_refused_in_one_line_that_says_where(text: str, words: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        from_csv(text, "custom", "p.csv")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00F")
    for path in (tmp_path / "absent.csv", tmp_path, tmp_path / "binary.csv"):
        with pytest.raises(ScheduleError) as caught:
            read_csv(path)
        assert str(caught.value).startswith(f"{path}: cannot be read")


@given(st.text(alphabet='0123456789FBIW_SEND;()",\r\n \x00x', max_size=60))
def test_any_text_is_a_plan_or_refused(text: str) -> None:
    try:
        plan = from_csv(text)
    except ScheduleError:
        return
    assert to_rows(from_csv(to_csv(plan))) == to_rows(plan)


def test_the_grid_has_a_line_per_rank_and_marks_places() -> None:
    grid = draw(build("1f1b", 2, 2), [(1, 2)])
    assert grid.splitlines() == ["rank 0 | 0F0 0F1 0B0   0B1", "rank 1 | 1F0 1B0 >1F1< 1B1"]


def test_the_grid_keeps_its_columns_where_rows_differ_in_length() -> None:
    plan = from_rows([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1I1", "1W1"]], "mixed")
    lines = draw(plan).splitlines()
    assert lines[0] == "rank 0 | 0F0 0F1 0B0 0B1"
    assert lines[1] == "rank 1 | 1F0 1F1 1B0 1I1 1W1"
    assert draw(build("gpipe", 11, 1)).splitlines()[9].startswith("rank 9  | 9F0")
