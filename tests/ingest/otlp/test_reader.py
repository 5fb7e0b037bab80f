"""OpenTelemetry spans: Megatron-LM's come back as the plan that ran, others as ranges, damaged ones as far as they are whole."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import first_bytes
from pptrace.ingest.formats import detect, read_file
from pptrace.ingest.otlp.reader import read_otlp
from pptrace.model.traces import InputFormat
from pptrace.schedule.messages import peer_of
from pptrace.schedule.registry import build
from pptrace.workflow.analyse import Analysis
from pptrace.workflow.load import load
from tests.ingest import test_fuzz
from tests.ingest.otlp.otlp_files import Span, document, megatron_spans, printed, resource, step_begins, write_lines
from tests.roundtrip.test_roundtrip import found_ops
from tests.support.synthetic import PaperRun, groups_of, run_on_paper

ALL = ("all",)
OPS_ALONE = ("microbatch",)


def paper(name: str = "1f1b", p: int = 3, m: int = 5, v: int = 1, latency: int = 0) -> PaperRun:
    return run_on_paper(build(name, p, m, v), lambda action: 1000 if str(action.kind) == "F" else 2000, latency=latency)


def documents(
    run: PaperRun, groups: Sequence[str] = ALL, ranks: Sequence[int] | None = None
) -> list[dict[str, object]]:
    pp = run.plan.pp
    return [document(megatron_spans(run, rank, 2, groups), resource(rank, pp)) for rank in ranks or range(pp)]


def truth(run: PaperRun, rank: int, number: int) -> list[tuple[str, int, int]]:
    at = step_begins(run, number)
    return [(str(done.action), at + done.start, at + done.end) for done in run.computes(rank)]


def bubble_ratio(run: PaperRun) -> float:
    """Bubble over compute of all ranks of a run whose messages take no time."""
    begin, end = run.window
    compute = sum(done.end - done.start for rank in range(run.plan.pp) for done in run.computes(rank))
    return ((end - begin) * run.plan.pp - compute) / compute


def check(analysis: Analysis, run: PaperRun, steps: Sequence[int]) -> None:
    report = analysis.report
    assert report.framework == "megatron-lm"
    assert (report.mesh.pp, report.mesh.vpp) == (run.plan.pp, run.plan.num_chunks)
    assert (report.schedule.name, report.schedule.num_microbatches) == (run.plan.name, run.plan.num_microbatches)
    assert [step.step for step in report.steps] == list(steps)
    for number, step in enumerate(steps):
        for rank in range(run.plan.pp):
            assert found_ops(analysis.data.ops, rank, step) == truth(run, rank, number)
        assert report.steps[number].bubble.ratio == pytest.approx(bubble_ratio(run), abs=1e-12)


SHAPES = [("1f1b", 3, 5, 1), ("interleaved-1f1b", 2, 4, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("groups", [ALL, ("step", *OPS_ALONE), OPS_ALONE], ids="+".join)
def test_the_plan_that_ran_comes_back(shape: tuple[str, int, int, int], groups: Sequence[str], tmp_path: Path) -> None:
    """With all spans, with ops and steps, and with ops alone: then order tells the steps as well."""
    run = paper(*shape)
    path = write_lines(tmp_path / "spans.json", documents(run, groups))
    check(load([path], cache=False), run, (10, 11) if groups != OPS_ALONE else (0, 1))


def one_document(run: PaperRun, folder: Path) -> list[Path]:
    whole = {"resourceSpans": [own for one in documents(run) for own in one["resourceSpans"]]}
    path = folder / "spans.json"
    path.write_text(json.dumps(whole, indent=2))
    return [path]


def file_per_rank(run: PaperRun, folder: Path) -> list[Path]:
    return [write_lines(folder / f"collector-{n}.jsonl.gz", [one]) for n, one in enumerate(documents(run))]


def numbers_as_numbers(run: PaperRun, folder: Path) -> list[Path]:
    spans = [(megatron_spans(run, rank, 2), resource(rank, run.plan.pp)) for rank in range(run.plan.pp)]
    return [write_lines(folder / "spans.json", [document(own, of, text_numbers=False) for own, of in spans])]


def batches(run: PaperRun, folder: Path) -> list[Path]:
    """Spans of all ranks in turns, a few in each line, as a collector gets them; some of them twice."""
    lines = []
    for rank in range(run.plan.pp):
        spans = megatron_spans(run, rank, 2)
        lines += [document(spans[at : at + 7], resource(rank, run.plan.pp)) for at in range(0, len(spans), 7)]
    random.Random(3).shuffle(lines)
    return [write_lines(folder / "spans.json", [*lines, *lines[:5]])]


@pytest.mark.parametrize("write", [one_document, file_per_rank, numbers_as_numbers, batches])
def test_all_forms_of_a_file_say_the_same(write: Callable[[PaperRun, Path], list[Path]], tmp_path: Path) -> None:
    run = paper()
    paths = write(run, tmp_path)
    assert {detect(first_bytes(path)) for path in paths} == {InputFormat.OTLP}
    analysis = load(paths, cache=False)
    check(analysis, run, (10, 11))
    num_spans = [len(megatron_spans(run, rank, 2)) for rank in range(run.plan.pp)]
    assert [entry.num_events for entry in analysis.report.inputs] == num_spans


def test_printed_spans_are_read_between_the_lines_of_a_log(tmp_path: Path) -> None:
    run = run_on_paper(build("1f1b", 3, 5, 1), lambda _: 3_000_000)  # printed times have microseconds
    for rank in range(3):
        text = printed(megatron_spans(run, rank, 2), resource(rank, 3))
        noisy = text.replace("}\n{", "}\n [before step {1/2}] lm loss: 3.1\n{", 4)
        (tmp_path / f"log{rank}.txt").write_text("> setting up {\n" + noisy)
    analysis = load([tmp_path], cache=False)
    assert analysis.report.schedule.name == "1f1b"
    for rank in range(3):
        named = [name for name, _, _ in found_ops(analysis.data.ops, rank, 11)]
        assert named == [str(done.action) for done in run.computes(rank)]


def both_ends(run: PaperRun) -> list[tuple[int, str, str, int, int]]:
    """The messages of a step that either side posts alone: (rank, kind, direction, microbatch, peer)."""
    alone = [
        (rank, action.kind, action.microbatch, peer_of(run.plan, action))
        for rank in range(run.plan.pp)
        for group in groups_of(run.ranks[rank])
        if len(group) == 1 and (action := group[0].action).kind.is_p2p
    ]
    ends = {(rank, peer, str(kind)[-1], microbatch) for rank, kind, microbatch, peer in alone}
    return sorted(
        (rank, str(kind)[:4].lower(), str(kind)[-1], int(microbatch or 0), peer)
        for rank, kind, microbatch, peer in alone
        if (peer, rank, str(kind)[-1], microbatch) in ends
    )


def test_messages_belong_to_the_ops_next_to_them_and_none_goes_past_the_ends(tmp_path: Path) -> None:
    """Most messages of 1F1B have no span of their own, and the functions at the ends of the pipeline move nothing."""
    run = paper(latency=100)
    analysis = load([write_lines(tmp_path / "spans.json", documents(run))], cache=False)
    comms = analysis.data.comms[analysis.data.comms["step"] == 10]
    result = comms[["rank", "kind", "direction", "microbatch", "peer"]].itertuples(index=False, name=None)
    assert sorted(result) == both_ends(run)
    assert (comms["match"] >= 0).all()
    assert any("have a span on one rank only" in line for line in analysis.report.warnings)


def test_one_rank_tells_its_own_stage_and_no_bubble(tmp_path: Path) -> None:
    """Megatron exports the last rank alone unless told otherwise."""
    run = paper("interleaved-1f1b", 4, 4, 2)
    analysis = load([write_lines(tmp_path / "spans.json", documents(run, ranks=[3]))], cache=False)
    assert analysis.report.schedule.name == "interleaved-1f1b"
    assert found_ops(analysis.data.ops, 3, 10) == truth(run, 3, 0)
    assert [step.bubble.ratio for step in analysis.report.steps] == [None, None]
    assert any("no trace of rank 0, 1, 2 (of 4)" in line for line in analysis.report.warnings)


def test_the_last_rank_alone_does_not_tell_steps_without_a_span_of_them(tmp_path: Path) -> None:
    run = paper("1f1b", 4, 8, 1)
    analysis = load([write_lines(tmp_path / "spans.json", documents(run, OPS_ALONE, [3]))], cache=False)
    assert analysis.report.steps == ()
    assert any("no span marks the end of a step" in line for line in analysis.report.warnings)


@pytest.mark.parametrize("slowest", [True, False], ids=["pipeline slowest", "tp-pp-dp"])
def test_the_layout_of_ranks_is_what_the_order_of_ops_allows(slowest: bool, tmp_path: Path) -> None:
    run = paper("1f1b", 3, 5, 1)
    stage_of = (lambda rank: rank // 2) if slowest else (lambda rank: rank % 3)
    lines = [document(megatron_spans(run, stage_of(rank), 1), resource(rank, 3, dp=2)) for rank in range(6)]
    analysis = load([write_lines(tmp_path / "spans.json", lines)], cache=False)
    assert (analysis.report.mesh.pp, analysis.report.mesh.dp) == (3, 2)
    for rank in range(6):
        assert found_ops(analysis.data.ops, rank, 10) == truth(run, stage_of(rank), 0)


def test_evaluation_is_of_no_training_step(tmp_path: Path) -> None:
    run = paper()
    lines = []
    for rank in range(3):
        spans = megatron_spans(run, rank, 2, OPS_ALONE)
        last = max(span.end for span in spans)
        spans += [Span("megatron.microbatch.forward", last + 10 + 20 * n, last + 20 + 20 * n) for n in range(4)]
        spans.append(Span("megatron.evaluate", last + 5, last + 200))
        lines.append(document(spans, resource(rank, 3)))
    check(load([write_lines(tmp_path / "spans.json", lines)], cache=False), run, (0, 1))


def test_an_order_of_no_known_schedule_has_no_stages(tmp_path: Path) -> None:
    """Nothing says how many chunks there are, and the order of ops on the first rank is that of none."""
    run = paper("1f1b", 3, 5, 1)
    spans = megatron_spans(run, 0, 1, ("step", "microbatch"))
    ops = [index for index, span in enumerate(spans) if "microbatch" in span.name]
    spans[ops[1]] = replace(spans[ops[1]], name="megatron.microbatch.backward")
    spans[ops[-1]] = replace(spans[ops[-1]], name="megatron.microbatch.forward")
    lines = [document(spans, resource(0, 3)), *documents(run, ("step", "microbatch"), [1, 2])]
    analysis = load([write_lines(tmp_path / "spans.json", lines)], cache=False)
    compute = analysis.data.ops[analysis.data.ops["kind"].isin(("F", "B"))]
    assert len(compute) == 50
    assert set(compute["stage"]) | set(compute["microbatch"]) == {-1}
    assert any("the number of chunks per rank is unknown" in line for line in analysis.report.warnings)


def test_steps_without_ops_are_steps(tmp_path: Path) -> None:
    analysis = load([write_lines(tmp_path / "spans.json", documents(paper(), ("step", "optimizer")))], cache=False)
    assert analysis.report.framework == "megatron-lm"
    assert [(step.rank, step.step) for step in analysis.report.marked_steps][:2] == [(0, 10), (0, 11)]
    kinds = analysis.data.ops["kind"].astype(str).value_counts().to_dict()
    assert kinds == {"STEP": 6, "OPTIMIZER": 6}


def test_on_a_gpu_launching_is_no_compute(tmp_path: Path) -> None:
    run = paper()
    lines = [document(megatron_spans(run, r, 2), resource(r, 3) | {"dl.gpu.name": "NVIDIA H100"}) for r in range(3)]
    report = load([write_lines(tmp_path / "spans.json", lines)], cache=False).report
    assert report.schedule.name == "1f1b"
    assert [step.bubble.ratio for step in report.steps] == [None, None]
    assert {rank.compute_ns for step in report.steps for rank in step.ranks} == {None}
    assert any("NVIDIA H100" in line for line in report.warnings)


def test_of_several_runs_in_a_file_the_last_one_is_read(tmp_path: Path) -> None:
    run, before = paper(), paper("1f1b", 3, 4, 1)
    old = [document(megatron_spans(before, r, 1), resource(r, 3) | {"nemo.run.id": "run-0"}) for r in range(3)]
    moved = json.loads(json.dumps(old).replace('"17900', '"17800'))
    analysis = load([write_lines(tmp_path / "spans.json", [*moved, *documents(run)])], cache=False)
    check(analysis, run, (10, 11))
    assert any("contains 2 runs" in line for line in analysis.report.inputs[0].warnings)


def test_spans_of_another_program_are_ranges_without_ops(tmp_path: Path) -> None:
    spans = [
        Span("GET /cart", 1_790_000_000_000_000_000 + n, 1_790_000_000_000_000_500 + n) for n in range(0, 5000, 700)
    ]
    one = document(spans, {"service.name": "shop", "host.name": "a"})
    two = document(spans[:3], {"service.name": "payment", "host.name": "b"})
    report = load([write_lines(tmp_path / "spans.json", [one, two])], cache=False).report
    assert (report.framework, report.steps) == ("unlabelled", ())
    assert [(own.rank, own.num_events) for own in report.inputs] == [(0, 3), (1, 8)] or [
        (own.rank, own.num_events) for own in report.inputs
    ] == [(0, 8), (1, 3)]
    assert any("no forward or backward" in line for line in report.warnings)


def test_a_span_that_was_never_ended_is_left_out(tmp_path: Path) -> None:
    run = paper()
    spans = megatron_spans(run, 0, 1)
    spans.append(
        Span("megatron.microbatch.forward", spans[0].start, spans[0].end + 10**9, {"nemo.span.truncated": True})
    )
    (trace,) = read_otlp(write_lines(tmp_path / "spans.json", [document(spans, resource(0, 3))]))
    assert trace.info.num_events == len(spans) - 1


def test_a_cut_file_keeps_its_whole_spans(tmp_path: Path) -> None:
    """A document is closed after its last whole span; of lines, the last one is."""
    run = paper()
    spans = megatron_spans(run, 0, 2)
    text = json.dumps(document(spans, resource(0, 3))).encode()
    starts = [index for index in range(len(text)) if text.startswith(b'{"traceId"', index)]
    path = tmp_path / "spans.json"
    for cut in (starts[5], starts[20] + 40, len(text) - 3):
        path.write_bytes(text[:cut])
        (trace,) = read_otlp(path)
        whole = sum(start < cut for start in starts) - (1 if cut < len(text) - 3 and cut not in starts else 0)
        assert len(trace.events) == whole
        assert any("truncated or damaged" in line for line in trace.warnings)
    packed = gzip.compress(b"\n".join([text] * 3))
    path.write_bytes(packed[: len(packed) - 20])
    assert any("gzip stream cut" in line for line in read_otlp(path)[0].warnings)


def test_a_line_that_was_cut_takes_no_other_with_it(tmp_path: Path) -> None:
    """As where a process was killed while it wrote, and the next one appended to the file."""
    path = write_lines(tmp_path / "spans.json", documents(paper()))
    first, second, third = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, second[: len(second) // 2], third]))
    whole = [len(megatron_spans(paper(), rank, 2)) for rank in range(3)]
    traces = read_otlp(path)
    assert [trace.rank for trace in traces] == [0, 1, 2]
    assert [len(traces[0].events), len(traces[2].events)] == [whole[0], whole[2]]
    assert 0 < len(traces[1].events) < whole[1]


def test_a_trace_that_ends_inside_a_step_keeps_the_steps_before(tmp_path: Path) -> None:
    """No span tells steps: those of which all ranks have every backward are whole. One that begins inside a step tells none."""
    run = paper("1f1b", 3, 5, 1)
    spans = [megatron_spans(run, rank, 2, OPS_ALONE) for rank in range(3)]
    cut = [document(own[: len(own) - 3], resource(rank, 3)) for rank, own in enumerate(spans)]
    analysis = load([write_lines(tmp_path / "cut.json", cut)], cache=False)
    assert [found_ops(analysis.data.ops, rank, 0) for rank in range(3)] == [truth(run, rank, 0) for rank in range(3)]
    assert [found_ops(analysis.data.ops, rank, 1) for rank in range(3)] == [
        truth(run, rank, 1)[:-3] for rank in range(3)
    ]
    late = [document(own[6:], resource(rank, 3)) for rank, own in enumerate(spans)]
    assert load([write_lines(tmp_path / "late.json", late)], cache=False).report.steps == ()


def test_the_number_of_chunks_is_what_the_number_of_microbatches_leaves(tmp_path: Path) -> None:
    for shape, chunks in ((("1f1b", 2, 4, 1), 1), (("interleaved-1f1b", 2, 4, 2), 2)):
        (trace,) = read_otlp(write_lines(tmp_path / "spans.json", documents(paper(*shape), ALL, [1])))
        assert trace.metadata["parallel"]["vpp"] == chunks
    (trace,) = read_otlp(write_lines(tmp_path / "spans.json", documents(paper(), OPS_ALONE, [1])))
    assert trace.metadata["parallel"]["vpp"] is None


def test_a_bad_span_among_good_ones_is_counted(tmp_path: Path) -> None:
    one = document(megatron_spans(paper(), 0, 1), resource(0, 3))
    rows = one["resourceSpans"][0]["scopeSpans"][0]["spans"]
    rows[3]["name"], rows[4]["startTimeUnixNano"], rows[5]["endTimeUnixNano"] = 7, "soon", "0"
    rows[6] = {"name": "never ended", "startTimeUnixNano": "1790000000000000000"}
    (trace,) = read_otlp(write_lines(tmp_path / "spans.json", [one]))
    assert len(trace.events) == len(rows) - 4
    assert trace.warnings == ("left out 4 spans without a name or with impossible times",)


def test_a_file_without_a_span_is_one_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "spans.json", [document([], resource(0, 3))])
    with pytest.raises(TraceError, match="no OpenTelemetry span that can be read; expected OTLP as JSON"):
        read_file(path, InputFormat.OTLP)


def test_damage_of_any_kind_gives_a_report_or_one_error(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "lines.json", documents(paper())).read_bytes()
    indented = json.dumps(documents(paper())[0], indent=1).encode()
    log = printed(megatron_spans(paper(), 1, 1), resource(1, 3)).encode()
    test_fuzz.run([("damaged.json", text) for text in (lines, indented, log)], test_fuzz.SEEDS, tmp_path)


def test_names_with_ids_are_taken_as_they_say(tmp_path: Path) -> None:
    """Megatron documents a microbatch id that it does not set; where one does, it wins over the order."""
    run = paper("1f1b", 2, 3, 1)
    lines = []
    for rank in range(2):
        spans = megatron_spans(run, rank, 1, OPS_ALONE)
        ids = [{"megatron.microbatch_id": 2 - done.action.microbatch} for done in run.computes(rank)]
        spans = [replace(span, attributes=own) for span, own in zip(spans, ids, strict=True)]
        lines.append(document(spans, resource(rank, 2)))
    ops: pd.DataFrame = load([write_lines(tmp_path / "spans.json", lines)], cache=False).data.ops
    first = ops[(ops["rank"] == 0) & (ops["kind"] == "F")].sort_values("start_ns")
    assert first["microbatch"].tolist() == [2, 1, 0]
