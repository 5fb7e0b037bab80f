"""``pptrace whatif`` as a user runs it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from html import unescape
from typing import Any

import pytest

from pptrace.analysis.whatif import study
from pptrace.analysis.whatif.result import Standing
from tests.support.programs import SAMPLES, one_line, pptrace_here

SAMPLE = SAMPLES / "1f1b_p2"
FIELDS = {
    *(
        "name",
        "schedule",
        "num_chunks",
        "num_microbatches",
        "split",
        "ideal",
        "span_ns",
        "low_ns",
        "high_ns",
        "gain_ns",
    ),
    *("bubble_ratio", "peak_inflight", "peak_memory_bytes", "verified_span_ns", "note"),
}


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs of one command for the sample: lines on a terminal, JSON, and a page. The best change is run as well."""

    lines: list[str]
    result: dict[str, Any]
    page: str


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    folder = tmp_path_factory.mktemp("whatif")
    files = ("--json", folder / "whatif.json", "--html", folder / "whatif.html")
    lines = pptrace_here("whatif", SAMPLE, "--verify", *files).out.splitlines()
    texts = [(folder / name).read_text(encoding="utf-8") for name in ("whatif.json", "whatif.html")]
    return Outputs(lines, json.loads(texts[0]), texts[1])


def test_the_json_has_the_fields_of_the_contract_best_first(outputs: Outputs) -> None:
    result = outputs.result
    assert result["schema"] == "pptrace.whatif/1"
    error = abs(result["replay_span_ns"] / result["measured_span_ns"] - 1)
    assert result["replay_error"] == pytest.approx(error)
    scenarios = result["scenarios"]
    assert all(set(one) >= FIELDS for one in scenarios)
    order = [(list(Standing).index(one["standing"]), -one["gain_ns"]) for one in scenarios]
    assert order == sorted(order)
    assert {one["standing"] for one in scenarios} == {"not sure", "no gain", "ideal"}
    assert result["framework"] == "pptrace"
    assert all(one["low_ns"] <= one["span_ns"] <= one["high_ns"] for one in scenarios)


def test_the_text_begins_with_whether_something_is_sure_to_help_and_the_replay_of_the_run(outputs: Outputs) -> None:
    lines = outputs.lines
    assert lines[0] == "Nothing here is sure to help: the interval of each change includes no gain"
    assert lines[1].startswith("replay of the run as it was: ")
    assert lines[2].startswith("! ranks waited for a core "), "what all of it hangs on comes first"
    assert not [line for line in lines if line.startswith("to paste")]
    heads = [line for line in lines if line.startswith(("not sure to help:", "no gain:", "now:", "If it cost less"))]
    begins = ["not sure to help", "no gain", "now", "not sure to help", "If it cost less"]
    assert [line.split(":")[0] for line in heads] == begins
    ideals = lines[lines.index("If it cost less") :]
    assert any(line.startswith("ideal communication ") for line in ideals)
    assert any(line.startswith("links twice as fast ") for line in ideals)
    assert any(line.startswith("as it was ") for line in lines)
    assert not [line for line in lines if line.startswith("dualpipe ")], "on two ranks both have the whole model"


def test_what_is_sure_to_help_is_named_with_the_options_of_the_framework_that_ran() -> None:
    lines = pptrace_here("whatif", SAMPLES / "uneven_p4").out.splitlines()
    assert lines[0].startswith("interleaved-zb, 2 chunks would take 34.")
    (pasted,) = (line for line in lines if line.startswith("to paste"))
    assert pasted == "to paste, pptrace: --schedule interleaved-zb --chunks 2 --split 1,1,1,1,1,1,1,1"


def test_ranks_that_share_a_gpu_are_named_first_and_no_change_is_sure_to_help_them() -> None:
    ended = pptrace_here("whatif", SAMPLES / "gpu_nccl_torch_1f1b_p4")
    lines = ended.out.splitlines()
    assert lines[0].startswith("Nothing here is sure to help: ranks share a GPU")
    assert lines[2].startswith("! ranks 0 to 3 share a GPU")
    lacking = lines.index("not in torch.distributed.pipelining:")
    (dualpipe,) = [number for number, line in enumerate(lines) if line.startswith("dualpipe ")]
    assert dualpipe > lacking > max(number for number, line in enumerate(lines) if line.startswith("zbv "))


def test_a_run_whose_backwards_are_split_is_advised_no_other_schedule_that_splits_them() -> None:
    folder = SAMPLES / "zbv_p4"
    all_of, asked_for = (
        json.loads(pptrace_here("whatif", folder, *options, "--json", "-").out)["scenarios"]
        for options in ((), ("--schedule", "zb-h2"))
    )
    of_all, asked = ({one["schedule"] for one in scenarios} for scenarios in (all_of, asked_for))
    assert not {"zb-h1", "zb-h2", "zb-auto", "interleaved-zb", "v-half", "v-min"} & of_all
    assert {"1f1b", "dualpipe-v"} <= of_all
    assert asked == {"zb-h2"}, "asked for by its name it is predicted"


def test_all_options_together_are_one_scenario() -> None:
    of_run = ("--schedule", "gpipe", "--microbatches", "8", "--microbatch-size", "0.5")
    options = (*of_run, "--ideal", "jitter", "--link-speed", "2")
    (one,) = json.loads(pptrace_here("whatif", SAMPLE, *options, "--json", "-").out)["scenarios"]
    found = tuple(one[name] for name in ("schedule", "num_microbatches", "microbatch_size", "ideal"))
    assert found == ("gpipe", 8, 0.5, ["jitter"])


def test_schedules_with_commas_between_them_are_a_scenario_each_and_an_ideal_counts_once() -> None:
    options = ("--schedule", "gpipe,zb-h1", "--schedule", "zbv", "--ideal", "jitter", "--ideal", "jitter")
    scenarios = json.loads(pptrace_here("whatif", SAMPLE, *options, "--json", "-").out)["scenarios"]
    assert {one["schedule"] for one in scenarios} == {"gpipe", "zb-h1", "zbv"}
    assert [one["ideal"] for one in scenarios] == [["jitter"]] * 3
    assert all(one["name"].count("jitter") == 1 for one in scenarios)


def test_ranks_in_the_order_of_today_are_no_change() -> None:
    result = json.loads(pptrace_here("whatif", SAMPLE, "--placement", "0,1", "--json", "-").out)
    assert result["scenarios"][0]["span_ns"] == result["today"]["span_ns"]


def test_the_best_change_is_run_in_real_processes_and_no_other(outputs: Outputs) -> None:
    scenarios = outputs.result["scenarios"]
    best = scenarios[0]
    assert not best["ideal"]
    assert best["verified_span_ns"] > 0.9 * best["low_ns"]
    assert [one["name"] for one in scenarios if one["verified_span_ns"] is not None] == [best["name"]]


def test_a_page_shows_the_table_and_both_replays(outputs: Outputs) -> None:
    page = outputs.page
    views = re.findall(r'<div class="timeline" data-view="(.*?)"', page)
    assert len(views) == 2
    assert len(set(views)) == 1, "on one scale"
    assert "What would get it back" in page
    titles = re.findall(r'<h3>([^<]*)</h3><div class="timeline"', page)
    assert re.fullmatch(r"Step \d+ as it was, replayed", titles[0])
    assert titles[1].startswith("Predicted step of ")
    named = [json.loads(unescape(tiles))["about"]["stepName"] for tiles in re.findall(r'data-tiles="(.*?)"', page)]
    assert [f"{name[:1].upper()}{name[1:]}" for name in named] == titles


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--split", "1,x"), 2, "--split 1,x: expected layers of each stage such as"),
        (("--layers", "9,1"), 2, "--layers 9,1: the trace tells "),
        (("--placement", "x"), 2, "--placement x: expected whole numbers with commas between them, such as 3,2,1,0"),
        (("--split", "1,1,1"), 2, "expected 2, the layers of each stage of 1f1b"),
        (("--ideal", "luck"), 2, "--ideal luck: expected stage=N"),
        (("--memory-limit", "80XB"), 2, "--memory-limit 80XB: expected a size such as 80GB"),
        (("--wgrad-share", "1.5"), 2, "--wgrad-share is 1.5; expected a part of an op, from 0 to 1"),
        (("--fixed-share", "nan"), 2, "--fixed-share is nan; expected a part of an op, from 0 to 1"),
        (("--prefetch", "-1"), 2, "--prefetch is -1; expected at least 0"),
        (("--schedule", "zbv", "--chunks", "3"), 2, "zbv: 3 chunks per rank"),
        (("--step", "99"), 2, "step 99: the trace has no such step"),
    ],
)
def test_wrong_usage_is_one_line(options: tuple[str, ...], code: int, words: str) -> None:
    assert words in one_line(pptrace_here("whatif", SAMPLE, *options), code)


def test_a_run_that_nothing_can_be_predicted_from_is_an_error_after_what_was_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(study, "MOST_ERROR", -1.0)
    ended = pptrace_here("whatif", SAMPLE, "--schedule", "all", "--json", "-")
    assert "nothing is predicted: the replay of this run is " in one_line(ended, 1)
    assert json.loads(ended.out)["scenarios"] == []
