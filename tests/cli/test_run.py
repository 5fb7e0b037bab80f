"""``pptrace run`` with real processes over gloo on loopback."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pptrace.marks import METADATA_KEY, OpMark, SpanKind, SpanMark, UnknownMark, parse_mark
from tests.support.extent import ALL
from tests.support.forked import start_python

LIMIT_S = 120
COMMAND_LINE = """
import sys
from pptrace.cli.run import command
from pptrace.errors import PptraceError
try:
    command(prog_name="pptrace run")
except PptraceError as err:
    print(f"pptrace: {err}", file=sys.stderr)
    sys.exit(err.exit_code)
"""
UNMODIFIED = """
import sys
import torch, torch.distributed as dist
assert __name__ == "__main__" and sys.argv[1:] == ["--lr", "0.1"], sys.argv
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.ones(2, 4)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    print("did", step)
dist.destroy_process_group()
"""
DESCRIBED = """
import torch
from instrument import session
from pptrace.schedule.actions import parse_action
from pptrace.schedule.plan import make_plan
plan = make_plan("gpipe", [[parse_action("0F0"), parse_action("0B0")]])
run = session.current()
def predict(experts, steps):
    raise ValueError("no sizes")
run.describe({"pp": 1}, plan, [0], {"layers": 2}, predict)
weight = torch.ones(2, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for epoch in range(2):
    for step in run.steps(2):
        with run.recorder.op(plan.ranks[0][0], 2 * epoch + step):
            loss = weight.sum()
        loss.backward()
        optimizer.step()
        optimizer.step()
"""
RAISING = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
weight = torch.ones(2, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(9):
    weight.sum().backward()
    if step == 1:
        if dist.get_rank() == 1:
            raise ValueError("the loss is not finite")
        dist.recv(torch.zeros(1), src=1)
    optimizer.step()
"""
BLOCKED = """
import torch, torch.distributed as dist
from instrument import session
dist.init_process_group("gloo")
for step in session.current().steps(2):
    torch.ones(2).sum()
print("blocked")
dist.recv(torch.zeros(1), src=1 - dist.get_rank())
"""
ENDLESS = """
import time, torch
from instrument import session
try:
    for step in session.current().steps(1_000_000):
        torch.ones(2).sum()
        if step == 3:
            print("endless")
        time.sleep(0.01)
finally:
    print("tidied up")
"""
HANGING = """
import threading
from instrument import session
def pause():
    threading.Event().wait()
for step in session.current().steps(1):
    pass
pause()
"""
WITHOUT_STEPS = """
import torch
print(torch.ones(2) + 1)
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that has ended."""

    run_dir: Path
    code: int
    out: str
    err: str
    tail_s: float
    """From the last signal sent, or from the start, to the end."""

    @property
    def facts(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "run.json").read_text())

    def trace(self, rank: int) -> dict[str, Any]:
        with gzip.open(self.run_dir / f"rank{rank}.json.gz", "rt", encoding="utf-8") as file:
            return json.load(file)

    def spans(self, rank: int, kind: SpanKind) -> dict[int, tuple[float, float]]:
        """Step → start and end, in microseconds, of the ranges of a kind."""
        result = {}
        for event in self.trace(rank)["traceEvents"]:
            mark = parse_mark(event["name"]) if event.get("cat") == "user_annotation" else None
            assert not isinstance(mark, UnknownMark)
            if isinstance(mark, SpanMark) and mark.kind is kind:
                assert mark.step not in result
                result[mark.step] = (event["ts"], event["ts"] + event["dur"])
        return result


class Run:
    """A run in progress; its processes are known by their working directory.

    ``anew``: each begins as a new interpreter, and not as a fork of one that has imported torch.
    """

    def __init__(self, directory: Path, *args: str, anew: bool = False) -> None:
        self.run_dir = directory / "run"
        self._directory = directory
        self._out, self._err = directory / "out", directory / "err"
        command = [sys.executable, "-c", COMMAND_LINE, "-o", str(self.run_dir), "--no-analyze", *args]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = (subprocess.Popen if anew else start_python)(
                command,
                cwd=directory,
                env={**os.environ, "TMPDIR": str(directory)},  # a killed launcher leaves its temporary directory
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self._since = time.monotonic()

    def rank_pids(self) -> list[int]:
        """Processes of this run other than the launcher; none once nothing is left running."""
        result = []
        for path in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):
                if path.readlink() == self._directory:
                    result.append(int(path.parent.name))
        return [pid for pid in result if pid != self.process.pid]

    def are_asleep(self, for_s: float) -> bool:
        """Return whether the ranks' main threads sleep now and after a while and have done nothing between."""
        before = _main_threads(self.rank_pids())
        time.sleep(for_s)
        return before == _main_threads(self.rank_pids()) and all(state == "S" for state, *_ in before.values())

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if time.monotonic() > deadline or self.process.poll() is not None:
                pytest.fail(f"{what} never came; {self.said()}")
            time.sleep(0.02)

    def wait_for_output(self, text: str, times: int = 1) -> None:
        self.wait_until(lambda: self._out.read_text().count(text) >= times, f"{text!r} × {times}")

    def send(self, signum: int) -> None:
        self.process.send_signal(signum)
        self._since = time.monotonic()

    def said(self) -> str:
        return f"stdout: {self._out.read_text()}\nstderr: {self._err.read_text()}"

    def end(self) -> Ended:
        try:
            code = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {LIMIT_S} s; {self.said()}")
        tail_s = time.monotonic() - self._since
        assert self.rank_pids() == []
        return Ended(self.run_dir, code, self._out.read_text(), self._err.read_text(), tail_s)

    def clean_up(self) -> None:
        for pid in [*self.rank_pids(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(60)


def _main_threads(pids: Iterable[int]) -> dict[int, tuple[str, ...]]:
    """State, and user and system time in ticks."""
    fields = {pid: Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids}
    return {pid: (values[0], values[11], values[12]) for pid, values in fields.items()}


Start = Callable[..., Run]


@contextlib.contextmanager
def starting(directory: Path) -> Iterator[Start]:
    """Start ``pptrace run`` on a script given as text; whatever is left of it ends with the context."""
    runs: list[Run] = []

    def start_run(text: str, *args: str, script: tuple[str, ...] = ("train.py",), anew: bool = False) -> Run:
        (directory / "train.py").write_text(text)
        options = args[: args.index("--")] if "--" in args else args
        rest = args[args.index("--") + 1 :] if "--" in args else ()
        run = Run(directory, *options, *script, *rest, anew=anew)
        runs.append(run)
        return run

    try:
        yield start_run
    finally:
        for run in runs:
            run.clean_up()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path) as start_run:
        yield start_run


@pytest.fixture(scope="module")
def unmodified(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A whole run of a script that knows nothing of pptrace, with a secret in its environment."""
    with pytest.MonkeyPatch.context() as patch, starting(tmp_path_factory.mktemp("unmodified")) as start_run:
        patch.setenv("A_SECRET", "hunter2")
        return start_run(UNMODIFIED, "-n", "2", "--steps", "1:3", "--", "--lr", "0.1", anew=ALL).end()


def test_an_unmodified_script_gets_one_trace_per_rank_with_its_steps_from_the_optimizer(unmodified: Ended) -> None:
    ended = unmodified
    assert ended.code == 0, ended.err
    assert sorted(path.name for path in ended.run_dir.iterdir()) == ["rank0.json.gz", "rank1.json.gz", "run.json"]
    for rank in (0, 1):
        steps, optimizers = ended.spans(rank, SpanKind.STEP), ended.spans(rank, SpanKind.OPTIMIZER)
        assert list(steps) == list(optimizers) == [1, 2]
        for step in (1, 2):
            assert steps[step][0] <= optimizers[step][0] <= optimizers[step][1] <= steps[step][1]
        assert steps[1][1] <= steps[2][0]
    events = ended.trace(1)["traceEvents"]
    torch_steps = [event for event in events if event["name"].startswith("Optimizer.step")]
    for event in torch_steps:  # torch's own range lies inside ours: none crosses the end of a step
        assert any(
            s <= event["ts"] and event["ts"] + event["dur"] <= e for s, e in ended.spans(1, SpanKind.STEP).values()
        )
    assert len(torch_steps) == 2
    ranges = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert sum("all_reduce" in name for name in ranges if not name.startswith("pp1:")) == 4
    assert sum(name.startswith("pp1:call ") and "kind=all_reduce" in name for name in ranges) == 4  # each with its mark
    assert [line for line in ended.out.splitlines() if line.startswith("[rank 1]")] == [
        f"[rank 1] did {step}" for step in range(4)
    ]
    assert ended.out.splitlines()[-1] == f"pptrace dashboard {ended.run_dir}"
    assert "USDT" not in ended.err


def test_run_json_and_the_traces_say_what_ran_and_nothing_private(unmodified: Ended) -> None:
    ended, facts = unmodified, unmodified.facts
    assert (facts["schema"], facts["status"], facts["exit_code"]) == ("pptrace.run/1", "ok", 0)
    assert facts["command"] == ["train.py", "--lr", "0.1"]
    assert (facts["script"], facts["profiler"], facts["steps"]) == ("train.py", "torch", [1, 3])
    assert (facts["nnodes"], facts["node_rank"], facts["nproc_per_node"], facts["world_size"]) == (1, 0, 2, 2)
    assert [(rank["rank"], rank["trace"], rank["status"], rank["steps_seen"]) for rank in facts["ranks"]] == [
        (rank, f"rank{rank}.json.gz", "ok", 4) for rank in range(2)
    ]
    metadata = ended.trace(0)[METADATA_KEY]
    assert (metadata["schema"], metadata["rank"], metadata["world_size"]) == ("pptrace.trace/1", 0, 2)
    assert (metadata["steps"], metadata["backend"], metadata["device"]) == ([1, 3], "gloo", "cpu")
    assert metadata["versions"] == facts["versions"]
    assert metadata["host"] == facts["host"]
    clock = metadata["clock"]
    assert set(clock["start"]) == {"time_ns", "monotonic_ns", "perf_counter_ns"}
    assert all(clock["start"][name] < clock["stop"][name] for name in clock["start"])
    text = json.dumps(ended.trace(0)) + (ended.run_dir / "run.json").read_text()
    assert "hunter2" not in text
    assert str(ended.run_dir) not in text
    assert str(Path.home()) not in text


def test_a_module_that_marks_its_own_steps_is_profiled_by_them_and_described(start: Start) -> None:
    ended = start(DESCRIBED, "--steps", "1:3", script=("-m", "train")).end()
    assert ended.code == 0, ended.err
    assert list(ended.spans(0, SpanKind.STEP)) == [1, 2]
    assert ended.spans(0, SpanKind.OPTIMIZER) == {}
    marks = [parse_mark(event["name"]) for event in ended.trace(0)["traceEvents"]]
    assert [mark.step for mark in marks if isinstance(mark, OpMark)] == [1, 2]
    metadata = ended.trace(0)[METADATA_KEY]
    plan = {"name": "gpipe", "num_microbatches": 1, "rows": [["0F0", "0B0"]]}
    assert (metadata["mesh"], metadata["plan"], metadata["pp_ranks"]) == ({"pp": 1}, plan, [0])
    assert metadata["model"] == {"layers": 2}
    assert (ended.facts["mesh"], ended.facts["plan"]) == ({"pp": 1}, plan)
    assert ended.facts["command"] == ["-m", "train"]
    assert metadata["notes"] == ["what the script predicts of its bytes and memory failed: ValueError: no sizes"]


def test_a_rank_that_raises_is_named_and_the_others_end_with_their_traces(start: Start) -> None:
    ended = start(RAISING, "-n", "2", "--steps", "0:5").end()
    assert ended.code == 1
    assert ended.err.count("Traceback (most recent call last)") == 1
    assert ended.err.count("ValueError: the loss is not finite") == 2  # the headline, and the traceback's last line
    assert ended.err.startswith("pptrace: rank 1 failed: ValueError: the loss is not finite\nTraceback")
    assert re.search(r'File "/.*/train\.py", line 10, in <module>', ended.err)
    assert "runpy" not in ended.err
    assert "worker.py" not in ended.err
    assert ended.facts["status"] == "failed"
    ranks = ended.facts["ranks"]
    assert [rank["trace"] for rank in ranks] == ["rank0.json.gz", "rank1.json.gz"]
    assert [rank["steps_seen"] for rank in ranks] == [1, 1]
    assert (ranks[1]["status"], ranks[1]["error"]) == ("failed", "ValueError: the loss is not finite")
    for rank in (0, 1):
        assert list(ended.spans(rank, SpanKind.STEP)) == [0, 1]
        assert ended.trace(rank)[METADATA_KEY]["steps"] == [0, 1]  # complete ones


def test_ctrl_c_keeps_the_traces_of_ranks_that_are_blocked_in_a_receive(start: Start) -> None:
    run = start(BLOCKED, "-n", "2", "--steps", "1:9")
    run.wait_for_output("blocked", times=2)
    assert len(run.rank_pids()) == 2
    run.wait_until(lambda: run.are_asleep(0.5), "the receive of both")
    run.send(signal.SIGINT)
    ended = run.end()
    assert ended.code == 130
    assert ended.tail_s < 30
    assert ended.facts["status"] == "interrupted"
    assert [rank["trace"] for rank in ended.facts["ranks"]] == ["rank0.json.gz", "rank1.json.gz"]
    assert "Traceback" not in ended.err
    for rank in (0, 1):
        names = [event["name"] for event in ended.trace(rank)["traceEvents"]]
        assert any("recv" in name for name in names)
        assert ended.trace(rank)[METADATA_KEY]["steps"] == [1, 2]


def test_sigterm_ends_a_run_as_ctrl_c_does_and_lets_the_script_tidy_up(start: Start) -> None:
    run = start(ENDLESS, "--steps", "1:1000000")
    run.wait_for_output("endless")
    run.send(signal.SIGTERM)
    ended = run.end()
    assert ended.code == 143
    assert "tidied up" in ended.out
    assert (ended.facts["status"], ended.facts["exit_code"]) == ("interrupted", 143)
    assert len(ended.spans(0, SpanKind.STEP)) >= 2


def test_a_launcher_that_is_killed_leaves_no_rank_and_a_directory_that_can_be_read(start: Start) -> None:
    run = start(ENDLESS, "--steps", "1:1000000")
    run.wait_for_output("endless")
    run.send(signal.SIGKILL)
    run.process.wait(60)
    deadline = time.monotonic() + 60
    while run.rank_pids() and time.monotonic() < deadline:
        time.sleep(0.05)
    ended = run.end()
    assert ended.code == -signal.SIGKILL
    assert ended.facts["status"] == "running"
    assert (ended.run_dir / "rank0.json.gz").is_file()


def test_a_script_without_steps_leaves_no_trace_and_one_line_that_says_what_to_pass(start: Start) -> None:
    ended = start(WITHOUT_STEPS).end()
    assert ended.code == 0
    assert "tensor([2., 2.])" in ended.out.splitlines()
    assert ended.err.splitlines()[0] == (
        "pptrace: rank 0: no step was seen: no module ran, no backward pass, and no step of an optimizer; pass --steps all, "
        'or mark the steps with pptrace.mark("step")'
    )
    assert sorted(path.name for path in ended.run_dir.iterdir()) == ["run.json"]
    assert ended.facts["ranks"][0]["trace"] is None


def test_a_script_that_starts_torchrun_is_told_to_run_the_script_of_that(start: Start) -> None:
    ended = start(
        "import subprocess, sys; subprocess.run([sys.executable, '-c', '', '/bin/torchrun', 'train.py'])"
    ).end()
    assert ended.code == 0
    line = ended.err.splitlines()[0]
    assert "which started torchrun: the ranks of that are not recorded" in line
    assert "pptrace run -n RANKS SCRIPT" in line
    assert "--steps all" not in line


@pytest.mark.processes
def test_a_run_that_takes_too_long_is_ended_and_says_where_each_rank_is(start: Start) -> None:
    ended = start(HANGING, "--steps", "all", "--timeout", "8").end()
    assert ended.code == 124
    assert ended.facts["status"] == "timeout"
    assert "pptrace: still running after --timeout 8 s; where each rank is:\n" in ended.err
    assert "rank 0, 1 step done: in wait, called from pause (train.py:5)\n" in ended.err
    assert ended.facts["ranks"][0]["trace"] == "rank0.json.gz"
    assert ended.facts["ranks"][0]["steps_seen"] == 1
