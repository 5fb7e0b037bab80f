"""``pptrace.compare`` and ``pptrace compare``: one comparison as object, text, JSON and page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pptrace
from pptrace.errors import TraceError, UsageError
from tests.support.kineto import event_row, write_rows
from tests.support.noisy_runs import Noise, NoisyRun
from tests.support.programs import SAMPLES, one_line, pptrace_here

RUN = NoisyRun(steps=20)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return RUN.write(folder / "a.csv", 0), NoisyRun(steps=20, slower=0.1).write(folder / "b.csv", 1)


@pytest.fixture(scope="module")
def both(pair: tuple[Path, Path]) -> pptrace.RunComparison:
    return pptrace.compare(*pair)


def test_the_object_the_text_and_the_json_say_the_same(pair: tuple[Path, Path], both: pptrace.RunComparison) -> None:
    assert both.verdict == "slower"
    assert f"{both}\n" == pptrace_here("compare", *pair).out
    assert both.to_json() + "\n" == pptrace_here("compare", *pair, "--json", "-").out
    assert "Steps of B are longer: a typical step takes" in both.detail
    assert repr(both) == f"<pptrace.RunComparison: {both.detail}>"
    assert " ".join(str(both).split()).startswith(both.detail)
    assert " ".join(both._repr_html_().split()).startswith(f"<pre>{both.detail}")


def test_the_json_has_the_fields_of_the_contract(pair: tuple[Path, Path], both: pptrace.RunComparison) -> None:
    written: dict[str, Any] = json.loads(both.to_json())
    assert written["schema"] == "pptrace.compare/1"
    assert written["verdict"] == "slower"
    assert set(written["span"]) == {"a_ns", "b_ns", "change", "low", "high", "is_undisturbed"}
    assert written["span"]["change"] == written["span"]["b_ns"] / written["span"]["a_ns"] - 1
    assert written["span"]["low"] < written["span"]["change"] < written["span"]["high"]
    for part in written["parts"]:
        assert set(part) == {"name", "where", "a_ns", "b_ns", "change_ns", "significant", "adds_up"}
        assert isinstance(part["a_ns"], int)
        assert part["change_ns"] == part["b_ns"] - part["a_ns"]
    assert written["work"] == {"is_same": None, "detail": "batch and model are not known of A and B"}
    assert (both.work.is_same, both.work.detail) == (None, written["work"]["detail"])
    assert written["num_steps"] == {"a": 19, "b": 19}  # when the step behind the last one begins is not known
    assert len(both.parts) == len(written["parts"])
    assert both.parts.change_ns.tolist() == [part["change_ns"] for part in written["parts"]]


def test_runs_that_were_loaded_are_compared_as_their_paths(
    pair: tuple[Path, Path], both: pptrace.RunComparison
) -> None:
    assert pptrace.compare(*map(pptrace.load, pair)).to_json() == both.to_json()


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Directories of three runs each, which differ from start to start; those of B are slower."""
    folder = tmp_path_factory.mktemp("sides")
    for seed in range(6):
        side, run = ("a", "b")[seed % 2], NoisyRun(Noise(runs=0.002), steps=20, slower=0.1 * (seed % 2))
        (folder / side / str(seed)).mkdir(parents=True)
        run.write(folder / side / str(seed) / "ops.csv", seed)
    return folder / "a", folder / "b"


def test_several_runs_of_each_are_a_directory_of_runs_or_a_list_of_them(sides: tuple[Path, Path]) -> None:
    found = pptrace.compare(*sides)
    assert found.verdict == "slower"
    assert (found.num_runs.a, found.num_runs.b) == (3, 3)
    assert found.run_to_run.a is not None
    assert f"{found}\n" == pptrace_here("compare", *sides).out
    assert "3 runs of each" in found.detail
    runs_a, runs_b = (sorted(side.iterdir()) for side in sides)
    assert pptrace.compare(runs_a, [pptrace.load(runs_b[0]), *runs_b[1:]]).to_json() == found.to_json()
    with pytest.raises(UsageError, match="no run is given"):
        pptrace.compare([], runs_b)
    assert "holds directories of several runs (a, b)" in one_line(pptrace_here("compare", sides[0].parent, sides[1]), 1)


def test_the_page_is_one_file_with_every_part(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    page = tmp_path / "page.html"
    assert pptrace_here("compare", *pair, "--html", page).code == 0
    text = page.read_text(encoding="utf-8")
    assert "Steps of B are longer" in text
    assert "<title>pptrace · comparison, B against A</title>" in text
    assert text.count(">cooldown</td>") == 1
    assert "src=" not in text.partition("<script>")[0]


def test_facts_that_differ_are_shown_beside() -> None:
    out = pptrace_here("compare", SAMPLES / "1f1b_p2", SAMPLES / "1f1b_p4").out
    assert "Facts that differ" in out
    both = pptrace.compare(SAMPLES / "1f1b_p2", SAMPLES / "1f1b_p4")
    assert both.facts.set_index("name").loc["--microbatches"].tolist() == ["4", "8"]
    assert both.parts[both.parts.name != "compute"].significant.isna().all()


def test_recordings_are_compared_where_they_are_asked_for() -> None:
    """The samples are recordings that make steps longer."""
    samples = SAMPLES / "1f1b_p2", SAMPLES / "1f1b_p4"
    unrecorded, recorded = pptrace.compare(*samples), pptrace.compare(*samples, as_recorded=True)
    assert (unrecorded.span.a_ns, unrecorded.span.b_ns) == (24712227, 78156585)
    assert (recorded.span.a_ns, recorded.span.b_ns) == (30036022, 85432837)
    assert unrecorded.result.recording.a.recorded_ns == recorded.span.a_ns
    runs = [pptrace.load(path) for path in samples]
    assert pptrace.compare(*runs).to_json() == unrecorded.to_json()
    assert pptrace.compare(*runs, as_recorded=True).to_json() == recorded.to_json()
    for both, options in ((unrecorded, ()), (recorded, ("--as-recorded",))):
        assert pptrace_here("compare", *samples, *options).out == f"{both}\n"
    assert "steps are those without their recording: A's predicted (30.04 ms as recorded)" in str(unrecorded)
    assert "without their recording" not in str(recorded)
    with pytest.raises(UsageError, match="as_recorded"):
        pptrace.compare(*samples, as_recorded=1)


def test_a_brief_text_has_fewer_parts_than_all(pair: tuple[Path, Path]) -> None:
    brief, whole = (pptrace_here("compare", *pair, *options).out for options in ((), ("--all",)))
    assert "--all shows them" in brief
    assert "--all shows them" not in whole
    assert len(whole.splitlines()) > len(brief.splitlines())


def test_what_cannot_be_compared_is_one_line(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    nothing = write_rows(tmp_path / "none.json", [event_row("cpu_op", "aten::mm", 1, 5)])
    ended = pptrace_here("compare", pair[0], nothing)
    assert "no whole step" in one_line(ended, 1)
    missing = pptrace_here("compare", pair[0], tmp_path / "nowhere")
    assert "nowhere: not found" in one_line(missing, 1)
    assert pptrace_here("compare", pair[0]).code == 2
    assert pptrace_here("compare", *pair, "--json", "-", "--html", "-").code == 2


def test_a_wrong_argument_is_said() -> None:
    with pytest.raises(UsageError, match="path is 3"):
        pptrace.compare(3, SAMPLES / "1f1b_p2")
    with pytest.raises(TraceError, match="nowhere: not found"):
        pptrace.compare(SAMPLES / "1f1b_p2", "nowhere")
