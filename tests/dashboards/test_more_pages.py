"""The pages for steps, bubbles, communication, memory, stages, comparison and hangs, on whatever was recorded."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import pptrace
from dashboards.answers import Answers
from dashboards.app import PAGES, create_app, page_at
from dashboards.pages import (
    bubbles,
    communication,
    compare,
    experts,
    hang,
    memory,
    overview,
    problem,
    stages,
    steps,
    try_change,
)
from dashboards.parts import MOST_ROWS, guarded, shortened
from dashboards.store import Loaded, Store
from pptrace.analysis.compare.result import REMAINDER, PartChange
from pptrace.api.wishes import Wishes
from pptrace.errors import PptraceError
from pptrace.marks import METADATA_KEY
from pptrace.model.report_table import ReportTable
from pptrace.report.step_tiles import bar_of
from pptrace.report.to_files import write_csv
from pptrace.workflow.load import load
from tests.analysis.compare.test_without_pipeline import run_of
from tests.analysis.experts.test_experts import Experts
from tests.analysis.test_hang import three_dimensions
from tests.analysis.test_plain_steps import ROWS
from tests.dashboards.synthetic import write_run
from tests.support.analysed import analyse
from tests.support.flight_recorder import entry, write_dump
from tests.support.kineto import event_row, write_changed, write_rows
from tests.support.noisy_runs import NoisyRun
from tests.support.programs import SAMPLES

OTHER = SAMPLES / "1f1b_p2"


def nodes(part: Any) -> Iterator[Any]:
    """All components below a part of a page, and their texts."""
    if isinstance(part, list | tuple):
        for child in part:
            yield from nodes(child)
    elif part is not None:
        yield part
        yield from nodes(getattr(part, "children", None))


def ids(part: Any) -> set[str]:
    return {node.id for node in nodes(part) if isinstance(getattr(node, "id", None), str)}


def text(part: Any) -> str:
    """The texts of a page, those of its tables as markup."""
    return " ".join(node if isinstance(node, str) else str(getattr(node, "data-markup", "")) for node in nodes(part))


def figures(part: Any) -> dict[str, Any]:
    """By their ids."""
    return {node.id: node.figure for node in nodes(part) if hasattr(node, "figure")}


def pages_of(path: Path) -> dict[str, list[Any]]:
    """The parts of every page of a run, with those that are filled later."""
    store = Store([path])
    loaded, answers = store.get(), Answers(store, Store([OTHER]))
    assert loaded.analysis is not None, loaded.error
    report = loaded.analysis.report
    step = loaded.steps[0].step if loaded.steps else None
    axis = next(iter(communication.axes_of_links(report)), None)
    makes: dict[str, Callable[[], Any]] = {
        "steps": lambda: steps.body(loaded, step),
        "bubbles": lambda: bubbles.body(loaded, step),
        "whatif": lambda: bubbles.changes(answers.predicting(Wishes()).wait(60), {}),
        "try": lambda: try_change.tried(answers, {"schedule": "zb-h1"}),
        "communication": lambda: [*communication.of_step(loaded, step), *communication.of_links(report, axis)],
        "memory": lambda: memory.body(loaded),
        "stages": lambda: stages.body(loaded, answers),
        "experts": lambda: experts.body(loaded),
        "split": lambda: stages.advice(answers, None),
        "compare": lambda: compare.body(loaded, answers),
        "hang": lambda: hang.body(answers),
    }
    return {name: guarded(make, name, f"{name}-refused") for name, make in makes.items()}


@pytest.fixture(scope="module")
def uneven() -> dict[str, list[Any]]:
    return pages_of(SAMPLES / "uneven_p4")


def test_a_whole_run_has_every_picture(uneven: dict[str, list[Any]]) -> None:
    drawn = {name: set(figures(page)) for name, page in uneven.items()}
    assert drawn == {
        "steps": {"steps-chart"},
        "bubbles": {"bubbles-waterfall", "bubbles-causes", "bubbles-blame"},
        "whatif": {"whatif-front"},
        "try": set(),
        "communication": {"comms-chart", "matrix-bytes", "matrix-transfer", "matrix-late-sender", "link-rates"},
        "memory": {"memory-peaks", "memory-in-flight"},
        "stages": {"stages-chart", "stage-work-chart"},
        "split": set(),
        "experts": set(),
        "compare": {"compare-waterfall-a", "compare-waterfall-b", "compare-causes", "compare-parts"},
        "hang": set(),
    }
    assert not any(f"{name}-refused" in ids(page) for name, page in uneven.items() if name != "hang")


def test_every_picture_and_table_has_its_files(uneven: dict[str, list[Any]]) -> None:
    for page in uneven.values():
        saved = {getattr(node, "data-picture", None) for node in nodes(page)}
        assert figures(page).keys() <= saved
    links = {node.href for page in uneven.values() for node in nodes(page) if getattr(node, "href", None)}
    client = create_app([SAMPLES / "uneven_p4"], other=OTHER).server.test_client()
    assert len(links) > 20
    assert {client.get(link).status_code for link in sorted(links)} == {200}


def test_a_change_is_drawn_below_the_measured_step(uneven: dict[str, list[Any]]) -> None:
    (view,) = (view for node in nodes(uneven["try"]) if (view := getattr(node, "data-view", None)))
    assert view == "step=6&sources=measured%2Cwhatif&whatif=schedule%3Dzb-h1"
    assert "pptrace whatif PATH --schedule zb-h1 --verify" in text(uneven["try"])
    predicted, drawn = (
        re.search(rf"{before}([\d.]+) ms", text(uneven["try"])) for before in ("zb-h1: ", "with the change ")
    )
    assert predicted
    assert drawn
    assert predicted[1] != drawn[1], "the replay of the run as it was is not exact"
    assert "ms by replay; the prediction adds" in text(uneven["try"]), "why the two differ"


def test_the_advised_split_is_there_to_paste(uneven: dict[str, list[Any]]) -> None:
    shown = text(uneven["split"])
    assert "2,2,2,2 layers in place of 4,2,1,1: " in shown
    for option in (
        "--split 2,2,2,2",
        '--pipeline-model-parallel-layout "Ett|tt|tt|ttL"',
        "tok_embeddings,layers.0,layers.1 layers.2,layers.3 layers.4,layers.5 layers.6,layers.7,norm,lm_head",
    ):
        assert option in shown


def test_layers_that_a_trace_does_not_tell_can_be_written(tmp_path: Path) -> None:
    """Tables of ops say nothing of a model."""
    write_csv(load([SAMPLES / "1f1b_p4"]), tmp_path)
    answers = Answers(Store([tmp_path]))
    assert "split-unknown" in ids(stages.advice(answers, None))
    assert ids(stages.advice(answers, "1,1,1,1")) == {"split-best"}
    assert "split-paste" in ids(stages.advice(answers, "5,1,1,1"))
    with pytest.raises(PptraceError, match="--layers 1,2: expected 4, one number"):
        stages.advice(answers, "1,2")


def lonely(folder: Path) -> Path:
    """One rank of four."""
    write_run(folder, "1f1b", pp=4, num_microbatches=4)
    for rank in (1, 2, 3):
        (folder / f"rank{rank}.json.gz").unlink()
    return folder


def without_pipeline(folder: Path) -> Path:
    """Two ranks whose steps are marked, with collectives in them."""
    (folder / "ops.csv").write_text(ROWS)
    return folder


def without_steps(folder: Path) -> Path:
    return write_rows(folder / "rank0.json.gz", [event_row("cpu_op", "aten::mm", 1.0, 2.0)]).parent


EMPTY: dict[Callable[[Path], Path], dict[str, str]] = {
    lonely: {"whatif": "whatif-refused", "bubbles": "not-explained", "communication": "no-links"},
    without_pipeline: {
        "bubbles": "no-pipeline",
        "stages": "no-stages",
        "communication": "no-links",
        "whatif": "whatif-refused",
    },
    without_steps: {
        "steps": "no-steps",
        "bubbles": "no-steps",
        "communication": "no-steps",
        "memory": "no-memory",
        "stages": "no-steps",
        "compare": "compare-refused",
    },
}


def test_stages_whose_ops_are_of_two_groups_have_points() -> None:
    def body_of(path: Path) -> Any:
        store = Store([path])
        return stages.body(store.get(), Answers(store))

    faulty, even = (str(body_of(path)) for path in (SAMPLES / "faults_pp2_dp2", SAMPLES / "uneven_p4"))
    assert "20 ops of" in faulty
    assert "points: ops" in faulty
    assert "stage-groups" not in even
    assert "bars: the median op" in even


def test_memory_over_time_that_was_not_recorded_says_how_to_record_it() -> None:
    page = str(memory.body(Store([SAMPLES / "1f1b_p2"]).get()))
    assert "Memory over time" in page
    assert "pptrace run --memory" in page


def test_what_is_not_known_of_memory_is_in_words(tmp_path: Path) -> None:
    reason = "the attention ran without a fused kernel, and what it stores is not known"
    unknown = {"activations_bytes": None, "stages": {}, "reason": reason}
    write_changed(
        SAMPLES / "gpu_zbv_p2", tmp_path, lambda _, trace: trace[METADATA_KEY]["predicted"]["memory"].update(unknown)
    )
    page = str(memory.body(Store([tmp_path]).get()))
    assert "activations and the sum of all parts: the attention ran without a fused kernel" in page
    assert "_bytes" not in page


@pytest.mark.parametrize("make_run", list(EMPTY))
def test_a_page_that_lacks_what_it_needs_says_why(make_run: Callable[[Path], Path], tmp_path: Path) -> None:
    run = make_run(tmp_path)
    shown = pages_of(run)
    store = Store([run])
    page = bubbles.layout(store.get(), Answers(store))
    assert "try" not in ids([page]), "no fields for what cannot be predicted"
    assert ("no-prediction" in ids([page])) == bool(store.get().steps)
    for name, page in shown.items():
        assert page, name
        assert "a mistake in pptrace" not in text(page), name
    for name, id in EMPTY[make_run].items():
        assert id in ids(shown[name]), name


def test_a_mistake_of_our_own_is_a_line_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> list[Any]:
        raise ZeroDivisionError("division by zero")

    assert "ZeroDivisionError: division by zero (a mistake in pptrace" in text(guarded(fail, "Steps", "steps-failed"))
    assert "Traceback" in caplog.text


def test_broken_inputs_show_the_problem_on_every_page_but_that_of_hangs(tmp_path: Path) -> None:
    (tmp_path / "rank0.json.gz").write_bytes(b"no trace")
    store = Store([tmp_path])
    loaded, answers = store.get(), Answers(store)
    for path, page in PAGES.items():
        found = ids(page_at(path, loaded, answers))
        assert ("problem" in found) == page.needs_report, path
    assert "no-hang" in ids(page_at("/hang", loaded, answers))


def test_two_runs_are_not_to_be_recorded_anew_for_a_file_that_is_no_trace(tmp_path: Path) -> None:
    runs = [tmp_path / schedule for schedule in ("gpipe", "1f1b")]
    for run in runs:
        run.mkdir()
        write_run(run, run.name, pp=2, num_microbatches=4)
        (run / "notes.json").write_text('{"steps": 3}', encoding="utf-8")
    page = text(problem.layout(Store(runs).get()))
    assert "is of another run than" in page
    assert "Reload this page when this is mended." in page


def test_a_run_file_that_cannot_be_read_is_not_said_to_be_of_a_healthy_run(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"schema": "pptrace.run/1"')
    (tmp_path / "rank0.json.gz").write_text("junk")
    (tmp_path / "rank0.facts.json").write_text("{}")
    store = Store([tmp_path])
    page = hang.layout(store.get(), Answers(store, Store([OTHER])))
    assert "No run that hung" not in text(page)
    assert "Nothing is known of a hang" in text(page)
    assert "run.json: no JSON object" in text(page)
    problems = {file.name: file.problem for file in store.get().files}
    assert problems["run.json"] == "no JSON object"
    assert problems["rank0.facts.json"] == "", "it is the launcher's"
    assert problems["rank0.json.gz"] not in ("", "can be read")


def test_a_series_of_pipeline_spans_is_called_so(run_p4: Path) -> None:
    """The steps of this run have no optimizer after the last: its whole length is not known, and spans are compared."""
    loaded = Store([run_p4]).get()
    of_steps, of_overview = text(steps.body(loaded, 2)), text(overview.body(loaded, 2))
    assert "Pipeline span of every step" in of_steps
    assert "median of pipeline spans" in of_steps
    span = loaded.steps[0].span_ns / 1e6
    assert f"pipeline span {span:.2f} ms the chosen one" in of_overview


def test_what_a_finding_costs_says_so_where_the_replay_that_tells_it_misses_the_step() -> None:
    """Of a run whose replay is 22 % too long, and of one whose is not."""
    for name, is_missed in (("gpu_1f1b_p4", True), ("uneven_p4", False)):
        run = pptrace.load(SAMPLES / name)
        costs = sum(finding.gain_ns is not None for finding in run.report.findings)
        page = " ".join(
            part for part in nodes(overview.body(Store([SAMPLES / name]).get(), None)) if isinstance(part, str)
        )
        for shown in (" ".join(run.to_text(everything=True).split()), run.to_html(), page):
            assert shown.count("by a replay that misses the step by 22%") == costs * is_missed
        assert costs > 1


def test_the_overview_of_a_hang_says_once_what_happened_and_how_the_run_ended() -> None:
    loaded = Store([SAMPLES / "hang_p4"]).get()
    page = overview.body(loaded, 2)
    (sentence,) = [part for part in nodes(page) if isinstance(part, str) and "wait for each other" in part]
    assert sentence.startswith("cycle: ranks 1 and 2 wait for each other")
    assert "The run ended as timeout. What was recorded until then is shown below." in text(page)
    assert {"hang", "hang-graph"} <= ids(page)


def test_a_hang_is_a_verdict_with_its_graph_and_table(tmp_path: Path) -> None:
    three_dimensions(tmp_path, 10, [])
    page = hang.body(Answers(Store([tmp_path])))
    assert "missing: rank 10 is missing" in text(page)
    assert "hang-graph" in ids(page)
    assert not figures(page)
    assert "16 ranks were seen" in text(page)


def test_the_name_of_a_group_is_text(tmp_path: Path) -> None:
    group = ("0", "<script>alert(1)</script>")
    for rank in range(2):
        calls = [entry("nccl:all_reduce", 1, "started", group)] if rank else []
        write_dump(tmp_path / f"dump_{rank}", calls, {" ".join(group): range(2)})
    page = hang.body(Answers(Store([tmp_path])))
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text(page)
    assert not any("<script>" in getattr(node, "data-markup", "") for node in nodes(page))


def test_one_run_alone_says_how_to_compare(uneven: dict[str, list[Any]]) -> None:
    alone = Answers(Store([OTHER]))
    page = compare.layout(Loaded((OTHER,)), alone)
    assert "pptrace dashboard A --compare B" in text(page)
    assert "Steps of B are shorter: a typical step takes 549.27 ms in A and 24.71 ms in B" in text(uneven["compare"])


def test_two_waterfalls_have_one_scale(uneven: dict[str, list[Any]]) -> None:
    pictures = figures(uneven["compare"])
    ranges = [pictures[f"compare-waterfall-{name}"].layout.xaxis.range for name in "ab"]
    assert ranges[0] == ranges[1]
    assert ranges[0][1] > 545


def compared(a: Path, b: Path) -> list[Any]:
    """The page that compares two runs."""
    store = Store([a])
    return compare.body(store.get(), Answers(store, Store([b])))


def test_a_faster_run_has_one_sign_for_less(tmp_path: Path) -> None:
    files = [
        NoisyRun(steps=20, slower=share).write(tmp_path / f"{name}.csv", 0) for name, share in (("a", 0.0), ("b", -0.1))
    ]
    page = text(compared(*files))
    assert "−10." in page
    assert not re.search(r"(?<!\w)-\d", page)


def test_a_run_beside_itself_has_two_equal_waterfalls(tmp_path: Path) -> None:
    shutil.copytree(OTHER, tmp_path / "copy")
    pictures = figures(compared(OTHER, tmp_path / "copy"))
    assert pictures["compare-waterfall-a"] == pictures["compare-waterfall-b"]
    assert "compare-parts" not in pictures, "nothing changed"


def test_runs_without_a_pipeline_are_compared_by_the_parts_of_their_steps(tmp_path: Path) -> None:
    """No text of the page asks for a plan."""
    paths = [run_of(tmp_path / name, loads=name == "b") for name in "ab"]
    page = compared(*paths)
    assert figures(page).keys() == {"compare-causes", "compare-parts"}
    assert "Parts of a typical step" in text(page)
    assert "plan" not in text(page).partition("Warnings")[0]
    with_pipeline = compared(paths[0], OTHER)
    assert figures(with_pipeline).keys() == {"compare-waterfall-b", "compare-causes", "compare-parts"}
    assert "This run has no pipeline; the parts below are those that any step has." in text(with_pipeline)
    assert compare.note_on_chance([PartChange(REMAINDER, {}, 1, 2, 1, None, adds_up=True)]).startswith("none by more")


def test_a_long_table_is_cut_and_says_so() -> None:
    table = ReportTable(
        "x", "X", ("a",), tuple((str(row),) for row in range(MOST_ROWS + 3)), ("… 9 more: --all shows them",)
    )
    cut = shortened(table)
    assert (len(cut.rows), cut.notes) == (MOST_ROWS, ("… 3 more: in the files", "… 9 more: in the files"))
    assert shortened(structs.replace(table, rows=table.rows[:5])).rows == table.rows[:5]


def test_a_run_with_experts_has_the_pictures_and_tables_of_its_page() -> None:
    analysis = analyse(Experts(rows=((90, 80), (60, 60))).traces())
    page = experts.body(Loaded((), analysis))
    pictures = figures(page)
    assert set(pictures) == {*("expert-routes", "expert-rows", "expert-lateness", "expert-late-steps", "expert-matrix")}
    heat = pictures["expert-routes"].data[0]
    assert [list(row) for row in heat.z] == [[150 / 120, 90 / 120], [140 / 120, 100 / 120]]
    assert list(heat.y) == ["layer 4", "layer 5"]
    assert list(pictures["expert-rows"].data[0].x) == [3 * 290, 3 * 190]
    assert "routing-gain" in ids(page)
    for words in ("Experts, all steps", "Ranks with experts, all steps", "Calls of experts, all ranks and steps"):
        assert words in text(page)
    layers = tuple(structs.replace(layer, routes=None) for layer in analysis.report.experts.layers)
    report = structs.replace(analysis.report, experts=structs.replace(analysis.report.experts, layers=layers))
    no_routes = figures(experts.body(Loaded((), replace(analysis, report=report))))
    assert no_routes.keys() == set(pictures) - {"expert-routes"}
    unknown = figures(experts.body(Loaded((), replace(analysis, expert_traffic=None))))
    assert unknown.keys() == set(pictures) - {"expert-matrix"}


def test_where_no_rank_sends_rows_to_another_the_page_says_so() -> None:
    """One rank has all experts: nothing is unknown of calls that there are not."""
    analysis = analyse(Experts(rows=((90, 80), (60, 60))).traces())
    alone = structs.replace(analysis.report.experts, calls=(), ranks=(), steps=(), traffic=None, routing=None)
    report = structs.replace(analysis.report, experts=alone)
    page = text(experts.body(Loaded((), replace(analysis, report=report))))
    assert "No calls are known that bring rows to experts on other ranks." in page
    assert "do not tell how many rows" not in page
    assert "members of these calls" not in page


@pytest.mark.parametrize(
    ("marks", "words"),
    [
        ((True, None), "coloured: by more than chance"),
        ((None, None), "not known whether by more than chance"),
        ((None, False), "not known whether by more than chance"),
        ((False, False), "none by more than chance can explain"),
        ((), "none by more than chance can explain"),
    ],
)
def test_parts_of_which_it_is_not_known_are_not_called_chance(marks: tuple[bool | None, ...], words: str) -> None:
    assert compare.note_on_chance([PartChange("bubble", {}, 1, 2, 1, mark) for mark in marks]) == words


def test_the_overview_leads_to_the_tables_of_other_pages() -> None:
    loaded = Store([SAMPLES / "faults_pp2_dp2"]).get()
    page = overview.body(loaded, loaded.steps[0].step)
    (box,) = (node for node in nodes(page) if getattr(node, "id", "") == "other-pages")
    links = {node.href: text(item) for item in nodes(box) if type(item).__name__ == "Li" for node in item.children[:1]}
    assert set(links) == {"/steps", "/bubbles", "/communication", "/stages", "/memory"}
    assert set(links) <= set(PAGES)
    assert "Stragglers" in links["/stages"]
    assert "phases" in str(page)
    assert not {"comms", "links", "memory", "stragglers"} & ids(page)


def test_stragglers_are_shown_where_the_ops_of_a_run_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store([SAMPLES / "faults_pp2_dp2"])
    answers = Answers(store)

    def let_go(_make: object) -> None:
        raise PptraceError("this run has so many ops")

    monkeypatch.setattr(answers, "of_data", let_go)
    page = stages.layout(store.get(), answers)
    assert "stages-failed" in ids(page)
    assert "Stragglers" in text(page)


def test_pieces_of_the_bar_have_their_names_where_there_is_room() -> None:
    step = load([SAMPLES / "uneven_p4"]).report.typical_step
    pieces = bar_of(step)
    assert [piece.label for piece in pieces if piece.share >= 0.08] == ["compute", "structural", "imbalance"]
    assert {piece.label for piece in pieces if piece.share < 0.08} == {""}
    assert {piece.ink for piece in pieces} <= {"#ffffff", "#16181d"}
