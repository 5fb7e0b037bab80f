"""An assistant that asks about a sample over stdin and stdout, by the client of the SDK: one process for all questions."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import pptrace
from dashboards.answers import Answers
from dashboards.assistant.paging import Query
from dashboards.assistant.tools import Tools
from dashboards.store import Store
from pptrace.errors import UsageError
from tests.support.programs import ROOT, SAMPLES, pptrace_here

TOOLS = {"report", "findings", "evidence", "tables", "table", "whatif"}
QUESTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("report", {}),
    ("findings", {}),
    ("evidence", {"finding": 0}),
    ("tables", {}),
    ("table", {"name": "ranks", "where": {"step": 4}, "sort_by": "-compute_ns"}),
    ("table", {"name": "ops", "step": 4, "where": {"kind": "F", "rank": 1}, "sort_by": "start_ns", "limit": 3}),
    (
        "table",
        {"name": "ops", "step": 4, "where": {"kind": "F", "rank": 1}, "sort_by": "start_ns", "limit": 3, "offset": 3},
    ),
    ("table", {"name": "waterfall"}),
    ("whatif", {"change": {"schedule": "zb-h1"}}),
    ("whatif", {"change": {"schedule": "zb-h1", "wgrad_share": 0.3, "fixed_share": 0.1}}),
    ("whatif", {}),
    ("table", {"name": "../../etc/passwd"}),
    ("table", {"name": "ops", "where": {"no_such": 1}}),
    ("table", {"name": "steps", "limit": 100_000}),
    ("table", {"name": "waterfall", "step": 99}),
    ("evidence", {"finding": 99}),
    ("whatif", {"change": {"split": [1, 1, 1]}}),
    ("whatif", {"change": {"repair_order": True}}),
    ("whatif", {"change": {"schedule": "zb-h1", "repair_order": False}}),
    ("whatif", {"change": {"path": "/etc/passwd"}}),
    ("whatif", {"schedule": "zb-h1"}),
    ("no-such-tool", {}),
)


@dataclass(frozen=True, slots=True)
class Heard:
    """Description of the server by itself, and its answers: values, or the text of an error."""

    instructions: str
    tools: tuple[Any, ...]
    answers: tuple[dict[str, Any] | str, ...]
    log: str

    def answer(self, name: str, given: Mapping[str, Any]) -> Any:
        return self.answers[QUESTIONS.index((name, dict(given)))]

    def error(self, name: str, given: Mapping[str, Any]) -> str:
        text = self.answer(name, given)
        assert isinstance(text, str), "an error is a text"
        assert "Traceback" not in text
        assert str(Path.home()) not in text
        return text


async def ask(log: Path) -> Heard:
    from mcp import Client, StdioServerParameters, stdio_client  # takes a second, in this worker alone

    code = "from pptrace.cli.main import main; main()"
    server = StdioServerParameters(
        command=sys.executable, args=["-c", code, "mcp", str(SAMPLES / "1f1b_p2")], cwd=ROOT, env=dict(os.environ)
    )
    answers: list[dict[str, Any] | str] = []
    with log.open("w") as stream:
        async with Client(stdio_client(server, errlog=stream), read_timeout_seconds=120) as client:
            listed, instructions = await client.list_tools(), client.instructions
            for name, given in QUESTIONS:
                result = await client.call_tool(name, given)
                text = "".join(part.text for part in result.content)
                if not result.is_error:
                    assert json.loads(text) == result.structured_content
                answers.append(text if result.is_error else dict(result.structured_content or {}))
    return Heard(instructions or "", tuple(listed.tools), tuple(answers), log.read_text())


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Heard:
    asking = ask(tmp_path_factory.mktemp("mcp") / "stderr")
    with ThreadPoolExecutor(1) as thread:  # Playwright keeps a loop of its own in this one
        return thread.submit(asyncio.run, asking).result()


@pytest.fixture(scope="module")
def run() -> pptrace.Run:
    return pptrace.load(SAMPLES / "1f1b_p2")


def test_the_tools_are_described_and_only_read(heard: Heard) -> None:
    assert {tool.name for tool in heard.tools} == TOOLS
    assert all(tool.annotations.read_only_hint and tool.description for tool in heard.tools)
    arguments = {name for tool in heard.tools for name in tool.input_schema.get("properties", {})}
    assert not {name for name in arguments if "path" in name or "file" in name}, "no tool takes a path"
    assert "never instructions" in heard.instructions
    assert heard.log == ""


def test_report_findings_and_evidence_are_those_of_the_json_report(heard: Heard, run: pptrace.Run) -> None:
    expected = json.loads(run.to_json())
    report = heard.answer("report", {})
    assert report["verdict"] == expected["verdict"]
    assert report["steps"] == [step["step"] for step in expected["steps"]]
    assert report["text"] == run.to_text()
    found = heard.answer("findings", {})["findings"]
    assert [entry["title"] for entry in found] == [entry["title"] for entry in expected["findings"]]
    assert [entry["gain_ns"] for entry in found] == [entry["gain_ns"] for entry in expected["findings"]]
    evidence = heard.answer("evidence", {"finding": 0})
    assert evidence["finding"]["title"] == found[0]["title"]
    assert evidence["place"]["step"] in report["steps"]
    assert evidence["timeline"].startswith("/timeline?step=")


def test_tables_come_in_pages_filtered_and_sorted(heard: Heard, run: pptrace.Run) -> None:
    names = {entry["table"] for entry in heard.answer("tables", {})["tables"]}
    assert {"steps", "ranks", "ops", "links", "memory"} <= names
    ranks = heard.answer("table", {"name": "ranks", "where": {"step": 4}, "sort_by": "-compute_ns"})
    rows = [dict(zip(ranks["columns"], row, strict=True)) for row in ranks["rows"]]
    frame = run.ranks.query("step == 4").sort_values("compute_ns", ascending=False)
    assert [(row["rank"], row["compute_ns"]) for row in rows] == list(
        zip(frame["rank"], frame["compute_ns"], strict=True)
    )
    pages = [heard.answer(*QUESTIONS[index]) for index in (5, 6)]
    assert [(page["total_rows"], page["next_offset"], len(page["rows"])) for page in pages] == [(4, 3, 3), (4, None, 1)]
    ops = run.ops.query("step == 4 and kind == 'F' and rank == 1").sort_values("start_ns")
    at = pages[0]["columns"].index("microbatch")
    assert [row[at] for page in pages for row in page["rows"]] == [*ops.microbatch]
    waterfall = heard.answer("table", {"name": "waterfall"})
    parts = dict(waterfall["rows"])
    assert waterfall["step"] == run.report.typical_step.step
    assert sum(parts.values()) == run.report.typical_step.period_ns


def test_predictions_are_those_of_whatif(heard: Heard, run: pptrace.Run) -> None:
    one = heard.answer("whatif", {"change": {"schedule": "zb-h1"}})
    scenario = dict(zip(one["columns"], one["rows"][0], strict=True))
    expected = run.whatif("zb-h1").scenarios.iloc[0]
    assert (scenario["name"], scenario["span_ns"], one["total_rows"]) == (expected["name"], expected["span_ns"], 1)
    assumed = heard.answer("whatif", {"change": {"schedule": "zb-h1", "wgrad_share": 0.3, "fixed_share": 0.1}})
    span = assumed["rows"][0][assumed["columns"].index("span_ns")]
    assert span == run.whatif("zb-h1", wgrad_share=0.3, fixed_share=0.1).scenarios.iloc[0]["span_ns"]
    without_repair = heard.answer("whatif", {"change": {"schedule": "zb-h1", "repair_order": False}})
    assert without_repair == one
    everything = heard.answer("whatif", {})
    assert everything["total_rows"] == len(run.whatif().scenarios)
    assert everything["headline"]


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (("table", {"name": "../../etc/passwd"}), "is not known; expected one of steps"),
        (("table", {"name": "ops", "where": {"no_such": 1}}), "there is no column no_such; expected one of rank"),
        (("table", {"name": "steps", "limit": 100_000}), "limit"),
        (("table", {"name": "waterfall", "step": 99}), "step 99: there is no such step"),
        (("evidence", {"finding": 99}), "finding 99: expected 0 to"),
        (("whatif", {"change": {"split": [1, 1, 1]}}), "--split 1,1,1"),
        (("whatif", {"change": {"repair_order": True}}), "nothing to repair in this run"),
        (("whatif", {"change": {"path": "/etc/passwd"}}), "change.path"),
        (("whatif", {"schedule": "zb-h1"}), "whatif has no schedule; expected change, offset, limit"),
        (("no-such-tool", {}), "no-such-tool"),
    ],
)
def test_what_cannot_be_answered_is_an_error_that_says_why(question: Any, words: str, heard: Heard) -> None:
    assert words in heard.error(*question)


def test_without_the_sdk_the_command_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mcp", "mcp_types")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "dashboards.assistant.server", raising=False)
    monkeypatch.setitem(sys.modules, "mcp", None)
    ended = pptrace_here("mcp", SAMPLES / "1f1b_p2")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("pptrace: pptrace mcp needs the Model Context Protocol's SDK")
    assert "pip install 'pptrace[mcp]'" in ended.err


def test_a_path_where_nothing_is_ends_the_command(tmp_path: Path) -> None:
    ended = pptrace_here("mcp", tmp_path / "nowhere")
    assert (ended.code, ended.out) == (1, "")
    assert "not found; expected" in ended.err


def test_a_step_chooses_rows_in_every_table_and_one_that_is_missing_is_an_error() -> None:
    tools = Tools(Answers(Store([SAMPLES / "1f1b_p2"])))
    for name in ("ranks", "ops"):
        page = tools.table(name, 3, Query())
        place = page["columns"].index("step")
        assert {row[place] for row in page["rows"]} == {3}
        with pytest.raises(UsageError, match="step 999"):
            tools.table(name, 999, Query())
