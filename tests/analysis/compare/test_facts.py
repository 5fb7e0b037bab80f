"""Facts in which runs differ: what recorders wrote, and nothing that is nobody's business."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pptrace.analysis.compare.facts import core_wait_of, differing, facts_of, work_of
from pptrace.analysis.compare.result import Work
from pptrace.analysis.report import Report
from pptrace.workflow.load import load
from tests.support.programs import SAMPLES


@pytest.fixture(scope="module")
def report() -> Report:
    return load([SAMPLES / "1f1b_p2"]).report


def facts(report: Report, run: dict[str, Any] | None = None, **rank: Any) -> dict[str, str]:
    return facts_of(report, {0: rank, 1: rank}, run or {})


def test_versions_settings_hosts_and_devices_are_facts(report: Report) -> None:
    known = facts(
        report,
        {"command": ["train.py", "--lr", "3e-3", "--tied", "--shift=-1", "data.txt", "-q"], "profiler": "torch"},
        versions={"torch": "2.6.0", "cuda": None},
        environment={"NCCL_ALGO": "Ring", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        model={"layers": 4},
        host="node-a-12345678",
        backend="nccl",
        device="cuda:3 NVIDIA H200",
    )
    expected = {
        "ranks": "2",
        "pp": "2",
        "schedule": "1f1b",
        "microbatches": "4",
        "version of torch": "2.6.0",
        "NCCL_ALGO": "Ring",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "model layers": "4",
        "host": "node-a-12345678",
        "backend": "nccl",
        "device": "cuda NVIDIA H200",
        "profiler": "torch",
        "script": "train.py",
        "--lr": "3e-3",
        "--tied": "set",
        "--shift": "-1 data.txt",
        "-q": "set",
    }
    assert {name: known.get(name) for name in expected} == expected
    assert "version of cuda" not in known


def test_a_device_that_the_run_does_not_name_is_named_by_its_recorder(report: Report) -> None:
    assert facts(report, device_names=["NVIDIA H200", "NVIDIA H200"])["device"] == "NVIDIA H200"
    assert facts(report, device="cpu", device_names=["NVIDIA H200"])["device"] == "cpu"
    for broken in ("NVIDIA H200", [None, ""], 5):
        assert "device" not in facts(report, device_names=broken)


def test_negative_numbers_belong_to_their_option(report: Report) -> None:
    assert facts(report, {"command": ["a.py", "--shift", "-1", "-2.5"]})["--shift"] == "-1 -2.5"


OF_MODEL = {
    **{"model layers": "4", "model hidden": "96", "model sequence": "64"},
    **{"model microbatch_size": "2", "microbatches": "8"},
}


def test_models_and_batches_that_differ_are_other_work_and_another_cut_of_a_batch_is_not() -> None:
    assert work_of(OF_MODEL, OF_MODEL | {"schedule": "zb-h1"}).is_same is True
    assert work_of(OF_MODEL, OF_MODEL | {"model microbatch_size": "1", "microbatches": "16"}).is_same is True
    other = OF_MODEL | {"model hidden": "64", "microbatches": "4"}
    assert work_of(OF_MODEL, other) == Work(False, "sequences a step 16 and 8, hidden 96 and 64")


def test_the_batch_is_that_of_all_replicas() -> None:
    two = OF_MODEL | {"dp": "2"}
    assert work_of(OF_MODEL | {"dp": "1"}, two) == Work(False, "sequences a step 16 and 32")
    assert work_of(OF_MODEL | {"dp": "1"}, two | {"microbatches": "4"}).is_same is True


@pytest.mark.parametrize(
    ("lacking", "other", "reason"),
    [
        (tuple(OF_MODEL), {}, "batch and model are not known of A and B"),
        (("model layers",), {}, "batch and model are not known of A and B"),
        ((), {"model experts": "8"}, "batch and model are not known of A and B"),
        ((), {"script": "train.py", "model topk": "2"}, "batch and model are not known of A"),
    ],
)
def test_without_sizes_of_both_nothing_tells_whether_they_do_the_same(
    lacking: tuple[str, ...], other: dict[str, str], reason: str
) -> None:
    a = {name: value for name, value in OF_MODEL.items() if name not in lacking}
    assert work_of(a, a | other) == Work(None, reason)


def test_one_command_on_as_many_ranks_does_the_same_work() -> None:
    run = {"script": "train.py", "--batch": "8", "ranks": "2", "version of torch": "2.6"}
    assert work_of(run, run | {"version of torch": "2.7"}) == Work(True, "the same command on as many ranks")
    assert "2 and 4 ranks" in work_of(run, run | {"ranks": "4"}).detail
    for changed in ({"--batch": "16"}, {"--lr": "1"}, {"script": "other.py"}):
        work = work_of(run, run | changed)
        assert work.is_same is None
        assert work.detail.endswith(f"the commands differ in {next(iter(changed))}")


def test_only_what_differs_is_shown_with_what_one_run_lacks() -> None:
    changes = differing([{"a": "1", "b": "2", "c": "3"}], [{"a": "1", "b": "4", "d": "5"}])
    assert [(fact.name, fact.a, fact.b) for fact in changes] == [("b", "2", "4"), ("c", "3", None), ("d", None, "5")]


def test_an_option_that_a_known_command_lacks_was_not_given() -> None:
    known = {"script": "train.py", "--pp": "2"}
    assert [(fact.name, fact.a, fact.b) for fact in differing([{"script": "train.py"}], [known])] == [
        ("--pp", "not given", "2")
    ]
    changes = differing([{"host": "one"}], [known])  # no command of A
    assert {fact.name: (fact.a, fact.b) for fact in changes}["--pp"] == (None, "2")
    (secret,) = differing([{"script": "train.py", "--api-key": "hunter2"}], [{"script": "train.py"}])
    assert (secret.a, secret.b) == ("not shown", "not given")


@pytest.mark.parametrize("name", ["--token", "--hf-token", "--api-key", "--API_KEY", "--wandb.password", "--auth"])
def test_values_of_secrets_are_not_shown(name: str) -> None:
    (change,) = differing([{name: "hunter2"}], [{name: "hunter3"}])
    assert (change.a, change.b) == ("not shown", "not shown")


@pytest.mark.parametrize("name", ["--tokenizer", "--num-tokens", "--kv-heads", "--author", "--monkey"])
def test_names_that_only_look_like_secrets_are_shown(name: str) -> None:
    (change,) = differing([{name: "8"}], [{name: "16"}])
    assert (change.a, change.b) == ("8", "16")


@pytest.mark.parametrize("broken", [{"command": "train.py"}, {"command": [3]}, {"versions": [1]}, {"environment": "x"}])
def test_broken_facts_are_no_facts(report: Report, broken: dict[str, Any]) -> None:
    known = facts(report, broken, versions=7, model="big", core_wait={"wait_ns": "?"}, host=5, device=None)
    assert known["ranks"] == "2"
    assert "host" not in known


def test_waiting_for_a_core_is_a_mean_over_the_ranks_that_say(report: Report) -> None:
    waits = {0: {"core_wait": {"wait_ns": 10, "elapsed_ns": 100}}, 1: {"core_wait": {"wait_ns": 30, "elapsed_ns": 100}}}
    assert core_wait_of(waits) == pytest.approx(0.2)
    assert core_wait_of({**waits, 2: {}, 3: {"core_wait": {"wait_ns": 1, "elapsed_ns": 0}}}) == pytest.approx(0.2)
    assert core_wait_of({0: {}}) is None
    assert facts_of(report, waits, {})["waited for a core"] == "20.0% of the time"


def test_recorders_are_named_once(report: Report) -> None:
    infos = tuple(replace(info, producer="kineto 1") for info in report.inputs)
    assert facts(replace(report, inputs=infos))["recorder"] == "kineto 1"


def test_settings_of_another_writer_are_those_of_the_list_alone(report: Report) -> None:
    settings = {"API_TOKEN": "hunter2", "NCCL_ALGO": "Tree", "NCCL_MY_KEY": "hunter2", "NCCL_PROTO": 3}
    for known in (facts(report, {"environment": settings}), facts(report, environment=settings)):
        assert known["NCCL_ALGO"] == "Tree"
        assert known["NCCL_MY_KEY"] == "set"
        assert "hunter2" not in known.values()
        assert "NCCL_PROTO" not in known
