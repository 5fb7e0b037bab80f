"""XPlane files of JAX, from synthetic ones in the messages of ``xplane.proto``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pptrace.errors import TraceError
from pptrace.ingest.formats import detect, named_format
from pptrace.ingest.xplane.planes import WireError, fields, read_space, steps
from pptrace.ingest.xplane.reader import read_xplane
from pptrace.model.damage import KINDS, Damage
from pptrace.model.traces import Category, Events, InputFormat
from pptrace.recognise.device.work import COMMUNICATION_KERNEL, breakdown, device_work, kind_of_kernel
from pptrace.workflow.load import load
from tests.ingest import test_fuzz
from tests.ingest.xplane.xplane_files import Event, PlaneWriter, content, number, space, varint

US = 1_000_000
"""Picoseconds of a microsecond."""
BEGIN = 1_757_516_928_109_201_518


def _gpu(index: int, first_call: int = 1) -> PlaneWriter:
    product, reduction, of_copy = ({"correlation_id": first_call + number} for number in range(3))
    kernels = [
        Event("gemm_fusion.kd", 100 * US, 20 * US, product | {"hlo_op": "dot.1"}),
        Event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*)", 115 * US, 15 * US, reduction),
    ]
    copies = [Event("CopyDeviceToDevice", 140 * US, 4 * US, of_copy | {"memcpy_details": "size:64"})]
    plane = PlaneWriter(f"/device:GPU:{index}", index, {"core_count": 304})
    return (
        plane.add("Stream #16(Kernel)", kernels, 5_000)
        .add("Stream #17(MemcpyOther)", copies, 5_000)
        .add("XLA Ops", kernels, 5_000)
    )


def _host(first_calls: tuple[int, ...] = (1,)) -> PlaneWriter:
    host = PlaneWriter("/host:CPU", 99)
    for first in first_calls:
        calls = [
            Event("hipModuleLaunchKernel", (90 + n) * US, US // 2, {"correlation_id": first + n}) for n in range(3)
        ]
        host.add(f"Host Threads/{first}", calls, 5_000)
    python = [
        Event("train", 50 * US, 200 * US, {"step_num": 7}),
        Event("forward_step", 60 * US, 50 * US),
        Event("$train.py:12 main", 40 * US, 300 * US),
    ]
    return host.add("python", python, 5_000)


def _write(path: Path, *planes: PlaneWriter) -> Path:
    environment = PlaneWriter("Task Environment", 0, {"profile_start_time": BEGIN})
    path.write_bytes(space(*planes, environment))
    return path


def _names(events: Events, category: Category) -> list[str]:
    return sorted({events.names[code] for code in events.name_id[events.category == category].tolist()})


def test_a_gpu_has_its_streams_and_no_sum_over_them(tmp_path: Path) -> None:
    (trace,) = read_xplane(_write(tmp_path / "node-7.xplane.pb", _gpu(0), _host()))
    work = device_work(trace.events)
    found = breakdown(work)
    assert (found.compute_ns, found.communication_ns, found.memory_ns) == (20_000, 10_000, 4_000)
    assert found.overlap_ratio == pytest.approx(5 / 15)
    assert sorted(set(work.stream.tolist())) == [16, 17]
    assert (work.launch_ns - BEGIN - 5_000).tolist() == [90_000, 91_000, 92_000]
    assert trace.metadata == {"host_name": "node-7"}


def test_a_device_whose_plane_is_there_twice_is_one_rank(tmp_path: Path) -> None:
    """Messages that are appended to one another are one message."""
    once = read_xplane(_write(tmp_path / "once.xplane.pb", _gpu(0), _host()))
    twice = read_xplane(_write(tmp_path / "twice.xplane.pb", _gpu(0), _gpu(0), _host()))
    assert [trace.rank for trace in twice] == [trace.rank for trace in once]


def test_host_events_are_calls_python_steps_and_ranges(tmp_path: Path) -> None:
    (trace,) = read_xplane(_write(tmp_path / "a.xplane.pb", _gpu(0), _host()))
    assert _names(trace.events, Category.RUNTIME) == ["hipModuleLaunchKernel"]
    assert _names(trace.events, Category.PYTHON) == ["$train.py:12 main"]
    assert _names(trace.events, Category.ANNOTATION) == ["ProfilerStep#7", "forward_step"]


def test_every_device_of_a_host_is_a_rank_with_its_launches_alone(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.xplane.pb", _gpu(1, 11), _gpu(0), PlaneWriter("/device:GPU:2"), _host((1, 11)))
    traces = read_xplane(path)
    assert [trace.rank for trace in traces] == [0, 1]
    for trace, first in zip(traces, (1, 11), strict=True):
        calls = trace.events.category == Category.RUNTIME
        assert trace.events.correlation[calls].tolist() == [first, first + 1, first + 2]
        assert set(trace.events.device[trace.events.category > Category.HOST_LIMIT].tolist()) == {trace.rank}
    report = load([path], cache=False).report
    assert [rank.compute_ns for rank in report.steps[0].ranks] == [20_000] * 2
    assert [step.step for step in report.steps] == [7]


def test_devices_without_work_are_no_ranks_and_named_in_a_line(tmp_path: Path) -> None:
    idle = [PlaneWriter(f"/device:GPU:{number}") for number in (0, 2, 4)]
    path = _write(tmp_path / "a.xplane.pb", *idle, _gpu(3, 1), _gpu(1, 11), _host((1, 11)))
    report = load([path], cache=False).report
    assert (report.mesh.num_ranks, [entry.rank for entry in report.device]) == (2, [0, 1])
    assert [entry.breakdown.compute_ns for entry in report.device] == [20_000] * 2
    assert not any("no trace of rank" in line for line in report.warnings)
    assert report.inputs[0].warnings == ("no work of device 0, 2, 4, none done or none recorded: no rank",)


def test_what_to_do_about_unknown_idle_time_is_about_jax(tmp_path: Path) -> None:
    report = load([_write(tmp_path / "a.xplane.pb", _gpu(0))], cache=False).report
    (line,) = (line for line in report.warnings if "why the device was idle is not known" in line)
    assert line.endswith("JAX records launches of GPUs, of TPUs none")


def test_loops_of_a_tpu_are_not_counted_besides_what_runs_in_them(tmp_path: Path) -> None:
    operations = [
        Event("while.1", 0, 100 * US),
        Event("fusion.2", 10 * US, 30 * US),
        Event("all-reduce.3", 50 * US, 20 * US),
        Event("fusion.4", 110 * US, 10 * US),
    ]
    asynchronous = [Event("all-gather-start.5", 20 * US, 40 * US), Event("copy-start.6", 112 * US, 5 * US)]
    plane = PlaneWriter("/device:TPU:0")
    plane.add("XLA Modules", [Event("jit_step(1)", 0, 120 * US)]).add("Steps", [Event("12", 0, 120 * US)])
    plane.add("XLA Ops", operations).add("Async XLA Ops", asynchronous).add("Framework Ops", operations)
    (trace,) = read_xplane(_write(tmp_path / "a.xplane.pb", plane))
    found = breakdown(device_work(trace.events))
    assert found.compute_ns == 40_000
    assert found.overlap_ratio == pytest.approx(20 / 50)
    assert found.busy_ns == 70_000
    assert _names(trace.events, Category.MEMCPY) == ["copy-start.6"]
    assert _names(trace.events, Category.ANNOTATION) == ["ProfilerStep#12"]
    assert _names(trace.events, Category.DEVICE_ANNOTATION) == ["jit_step(1)"]
    recording = load([tmp_path / "a.xplane.pb"], cache=False).report.recording
    assert not recording.audit, "operations of a TPU have no launches, and lack none"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("all-reduce.1", "all_reduce"),
        ("%all-gather-start.12.3", "all_gather"),
        ("reduce-scatter", "reduce_scatter"),
        ("ragged-all-to-all.2", "all_to_all"),
        ("collective-permute-done.4", "send_recv"),
        ("send.1", "send_recv"),
        ("recv-done.7", "send_recv"),
        ("all-reduce-fusion.1", ""),
        ("sendable_kernel", ""),
        ("fusion.1", ""),
    ],
)
def test_operations_of_xla_that_carry_data_between_devices_are_known_by_their_names(name: str, kind: str) -> None:
    assert bool(COMMUNICATION_KERNEL.search(name)) == bool(kind)
    assert not kind or kind_of_kernel(name) == kind


def test_a_host_without_devices_is_one_trace(tmp_path: Path) -> None:
    (trace,) = read_xplane(_write(tmp_path / "rank3.xplane.pb", _host()))
    assert (trace.rank, len(trace.events)) == (None, 6)


def test_names_and_stats_of_key_zero_and_negative_keys_are_read() -> None:
    events = [Event("first", 1, 2, {"correlation_id": 0}), Event("second", 3_000, 4_000)]
    plane = PlaneWriter("/host:CPU").add("t", events)
    (read,) = read_space(space(plane), {"correlation_id"}).planes
    (line,) = read.lines
    assert [read.event_names[key] for key in line.names.tolist()] == ["first", "second"]
    assert (line.id, line.start_ns.tolist(), line.dur_ns.tolist()) == (-3, [0, 3], [0, 4])
    assert line.stats["correlation_id"].tolist()[0] == 0


def test_many_messages_are_read_as_one_by_one() -> None:
    random = np.random.default_rng(3)
    values = [[int(value) for value in 2 ** random.uniform(0, 63, 3)] for _ in range(200)]
    texts = [
        number(1, a) + content(9, b"x" * (a % 300)) + number(2, b) + varint(7 << 3 | 1) + bytes(8) + number(3, c)
        for a, b, c in values
    ]
    data = b"".join(texts)
    ends = np.cumsum(list(map(len, texts)))
    found = np.zeros((200, 4), dtype=np.int64)
    for rows, key, value, _ in steps(np.frombuffer(data, dtype=np.uint8), ends - np.array(list(map(len, texts))), ends):
        for which in (1, 2, 3):
            found[rows[key == which], which] = value[key == which]
    assert found[:, 1:].tolist() == values
    one = {key: value for key, value, stop in fields(texts[5], 0, len(texts[5])) if not stop}
    assert [one[key] for key in (1, 2, 3)] == values[5]


@pytest.mark.parametrize("data", [b"\x08", b"\x08\xff", b"\x0a\x05ab", b"\x0b", b"\x09abc", b"\x08" + b"\xff" * 11])
def test_bytes_that_end_inside_a_field_are_no_message(data: bytes) -> None:
    with pytest.raises(WireError):
        list(fields(data, 0, len(data)))
    with pytest.raises(WireError):
        list(steps(np.frombuffer(data, dtype=np.uint8), np.array([0]), np.array([len(data)])))


def test_lengths_and_times_beyond_every_file_are_damage(tmp_path: Path) -> None:
    too_long = content(1, content(2, "/host:CPU") + content(3, varint(4 << 3 | 2) + varint(2**63) + b"x"))
    assert read_space(too_long, ()).damage
    path = tmp_path / "a.xplane.pb"
    path.write_bytes(space(_gpu(0), PlaneWriter("Task Environment", 0, {"profile_start_time": 2**64 - 1})))
    (trace,) = read_xplane(path)
    assert trace.events.start_ns.min() == 105_000


def test_files_are_recognised_by_their_first_plane_and_by_their_name(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.xplane.pb", _gpu(0), _host())
    assert detect(path.read_bytes()[:100]) is InputFormat.XPLANE
    assert detect(space(_host())) is InputFormat.XPLANE
    assert named_format(path) is InputFormat.XPLANE
    assert detect(b"\n\x05hello") is None


def test_a_cut_file_gives_its_whole_planes_and_says_so(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.xplane.pb", _gpu(0), _gpu(1, 11), _host((1, 11)))
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"/host:CPU") + 100])
    traces = read_xplane(path)
    assert [trace.rank for trace in traces] == [0, 1]
    assert any("cut or damaged" in line and "kept the 2 planes" in line for line in traces[0].warnings)
    assert [KINDS[kind] for kind in traces[0].damage.kind.tolist()] == [Damage.CUT_FILE]


def test_a_file_that_was_copied_as_text_is_one_clear_line(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.xplane.pb", _gpu(0), _host())
    path.write_bytes(path.read_bytes().decode("utf-8", "replace").encode())
    with pytest.raises(TraceError, match=r"a\.xplane\.pb: plane 1 is cut or damaged.*copy it anew as a binary file"):
        read_xplane(path)


@pytest.mark.parametrize("data", [b"", b"nothing", space(PlaneWriter("/host:metadata"))])
def test_files_without_events_are_one_clear_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.xplane.pb"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=r"a\.xplane\.pb: .*expected"):
        read_xplane(path)


def test_damaged_files_give_a_report_or_one_error(tmp_path: Path) -> None:
    content_of = _write(tmp_path / "whole.pb", _gpu(0), _gpu(1, 11), _host((1, 11))).read_bytes()
    test_fuzz.run([("a.xplane.pb", content_of)], test_fuzz.SEEDS, tmp_path)
