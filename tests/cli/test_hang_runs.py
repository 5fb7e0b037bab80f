"""Hangs put into real runs over gloo on loopback, and the verdict of ``pptrace run`` on each.

``DEVICE_SCRIPT`` imitates NCCL: its calls return at once and run in order on what stands for a device, a message that has left
there is carried on by a thread of its process, and the host waits for the device outside of any call.

With PPTRACE_ALL set: all faults, on four ranks, and fifty healthy runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.extent import ALL
from tests.support.forked import PROGRAM, start_python
from tests.support.lateness import Lateness
from tests.support.programs import ROOT

pytestmark = pytest.mark.processes

HANG_S = 4.0
SLACK_S = 2.0
LIMIT_S = 120
SCRIPT = """
# a training loop in miniature, with one fault
import ctypes, os, signal, sys, time, torch, torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
fault = sys.argv[1]
grads = torch.ones(4)
for step in range(12):
    now = step == 6
    if now and fault != "none":
        Path(f"fault{rank}").write_text(str(time.monotonic()))
    if fault == "shape" and now and rank == 1:
        grads = torch.ones(8)
    if not (fault == "skip" and now and rank == 1):
        dist.all_reduce(grads)
    if now and rank == size - 1:
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "sleep":
            time.sleep(600)
        elif fault == "lock":
            ctypes.PyDLL(None).sleep(600)
        elif fault == "compute":
            sum(range(10**12))
        elif fault == "leave":
            os._exit(0)
    peer = rank ^ 1
    if fault == "swap" and now and rank < 2:
        dist.send(grads, peer)
        dist.recv(grads, peer)
    elif rank % 2 == 0:
        work = dist.isend(grads, peer)
        dist.recv(grads, peer)
        work.wait()
    else:
        dist.recv(grads, peer)
        dist.send(grads, peer)
    time.sleep(0.02)
dist.barrier()
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Ended:
    code: int
    lines: tuple[tuple[float, str], ...]
    """Lines of stderr, and when each came."""
    run: dict[str, Any]
    fault_s: float
    late_s: float
    """Time by which the busy machine was late, s; 0 on an idle one."""

    @property
    def verdict(self) -> tuple[float, str] | None:
        return next(((at, line) for at, line in self.lines if line.startswith("pptrace: hang: ")), None)

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)


DDP_SCRIPT = """
# the last rank is elsewhere while C++ waits for it in the others: in the backward of DDP, or before any call
import os, signal, sys, time, torch, torch.distributed as dist
from pathlib import Path
fault, is_last = sys.argv[1], os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
def stop(code):
    if is_last and fault == code:
        Path("fault").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL) if code == "kill" else time.sleep(600)
stop("never")
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
for step in range(4):
    loss = model(torch.ones(4)).sum()
    if step == 3:
        stop("backward")
        stop("kill")
    loss.backward()
dist.destroy_process_group()
"""

DEVICE_SCRIPT = """
# the last rank is stopped or killed after a step that is over on its device, while a thread of it still carries its message
import os, queue, signal, sys, threading, time, torch, torch.distributed as dist
fault = sys.argv[1]

class Returned(dist._Work):
    def wait(self, timeout=None):
        return True

class Thread:
    def __init__(self):
        self.tasks = queue.Queue()
        threading.Thread(target=self.run, daemon=True).start()
    def run(self):
        while True:
            task = self.tasks.get()
            try:
                task()
            except RuntimeError:  # the other end is gone: NCCL's watchdog aborts its process, if it comes to it
                os.abort() if fault == "abort" else time.sleep(600)
            self.tasks.task_done()

class Device(dist.ProcessGroup):
    group_name, delay_s = "0", 0.0
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.stream, self.network = Thread(), Thread()
    def launch(self, function, *args):
        self.stream.tasks.put(lambda: function(*args).wait())
        return Returned()
    def allreduce(self, tensors, opts):
        return self.launch(self.gloo.allreduce, tensors, opts)
    def recv(self, tensors, source, tag):
        return self.launch(self.gloo.recv, tensors, source, tag)
    def barrier(self, opts):
        return self.launch(self.gloo.barrier, opts)
    def send(self, tensors, target, tag):
        copy, delay_s = tensors[0].clone(), self.delay_s
        def carry():
            time.sleep(delay_s)
            self.gloo.send([copy], target, tag).wait()
        self.stream.tasks.put(lambda: self.network.tasks.put(carry))
        return Returned()

dist.Backend.register_backend("imitated_nccl", Device, devices=["cpu"])
dist.init_process_group("imitated_nccl")
rank, size = dist.get_rank(), dist.get_world_size()
device = dist.group.WORLD
synchronize = device.stream.tasks.join
grads = torch.ones(4)
for step in range(8):
    is_faulty = rank == size - 1 and fault != "none"
    if step == 3 and is_faulty:
        device.delay_s = 600.0
    if step == 4 and is_faulty:
        os.kill(os.getpid(), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
    dist.all_reduce(grads)
    for call in (dist.send, dist.recv) if rank % 2 == 0 else (dist.recv, dist.send):
        call(grads, rank ^ 1)
    synchronize()
dist.barrier()
synchronize()
dist.destroy_process_group()
"""


def run(folder: Path, fault: str, num_ranks: int, *options: str, script: str = SCRIPT) -> Ended:
    (folder / "train.py").write_text(script)
    process = start_python(
        [PROGRAM, "run", "-n", str(num_ranks), "--profiler", "none", "-o", "run", *options, "train.py", fault],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    timer = threading.Timer(LIMIT_S, lambda: os.killpg(process.pid, signal.SIGKILL))
    timer.start()
    with process, Lateness() as late:
        lines = tuple((time.monotonic(), line.rstrip("\n")) for line in process.stderr)
    timer.cancel()
    code = process.returncode
    faults = [float(path.read_text()) for path in folder.glob("fault*")]
    facts = json.loads((folder / "run" / "run.json").read_text())
    return Ended(code, lines, facts, max(faults, default=0.0), late.total_s)


FAULTS = {
    "kill": ("missing", [-1], "killed by SIGKILL after all_reduce #6 of group default_pg"),
    "swap": ("cycle", [0, 1], "rank 0 in send #6 to rank 1, rank 1 in send #6 to rank 0"),
    "lock": ("late", [-1], "asleep in <module> (train.py:25), outside of any communication call"),
    "sleep": ("late", [-1], "asleep in <module> (train.py:23), outside of any communication call"),
    "skip": ("mismatch", [1], "rank 1 is in recv #6 from rank 0, out of the order that it kept before"),
    "shape": ("mismatch", [1], "is all_reduce of 32 bytes on rank 1 but all_reduce of 16 bytes on rank"),
    "stop": ("late", [-1], "stopped by a signal"),
    "compute": ("late", [-1], "computing in <module> (train.py:27)"),
    "leave": ("missing", [-1], "is gone"),
}
"""The verdict, the guilty (-1: the last rank), and a part of the sentence."""


@pytest.mark.parametrize("fault", [*FAULTS] if ALL else ["kill", "swap"])
def test_a_fault_in_a_real_run_gets_its_verdict_in_time(tmp_path: Path, fault: str) -> None:
    num_ranks = 4 if ALL else 2
    ended = run(tmp_path, fault, num_ranks, "--hang-timeout", str(HANG_S))
    verdict, guilty, expected = FAULTS[fault]
    assert ended.verdict is not None, ended.text
    at, line = ended.verdict
    assert line.startswith(f"pptrace: hang: {verdict}: ")
    assert expected in line.replace(f"{tmp_path}/", "")
    hang = ended.run["hang"]
    if not (fault == "skip" and num_ranks == 2):  # of two ranks both may be wrong, where the habit of both is broken
        assert (hang["verdict"], hang["ranks"]) == (verdict, [rank % num_ranks for rank in guilty])
    has_ended = fault in ("kill", "leave")  # which torch's launcher sees, and ends the run at once
    assert at - ended.fault_s < SLACK_S + ended.late_s + (0 if has_ended else HANG_S)
    assert (ended.code, ended.run["status"]) == ((1, "failed") if has_ended else (124, "timeout"))
    assert ended.run["hang"]["detail"] in line


@pytest.mark.parametrize(
    ("fault", "verdict", "told"),
    [
        ("never", "late", "rank 1 is asleep in stop (train.py:9)"),
        *([("backward", "late", "rank 1 is asleep in stop (train.py:9)")] if ALL else []),
        ("kill", "missing", "rank 1 is gone (killed by SIGKILL"),
    ],
)
def test_ranks_that_wait_inside_cpp_are_seen_to_wait(tmp_path: Path, fault: str, verdict: str, told: str) -> None:
    ended = run(tmp_path, fault, 2, "--hang-timeout", str(HANG_S), script=DDP_SCRIPT)
    assert ended.verdict is not None, ended.text
    assert ended.verdict[1].replace(f"{tmp_path}/", "").startswith(f"pptrace: hang: {verdict}: {told}"), ended.text
    assert (ended.run["hang"]["verdict"], ended.run["hang"]["ranks"]) == (verdict, [1])
    assert [edge["waits_for"] for edge in ended.run["hang"]["edges"]] == [[1]]


@pytest.mark.parametrize("fault", ["abort", "stop", "kill", "none"] if ALL else ["abort"])
def test_a_rank_whose_process_does_not_carry_its_messages_on_is_to_blame(tmp_path: Path, fault: str) -> None:
    ended = run(tmp_path, fault, 2, "--hang-timeout", str(HANG_S), script=DEVICE_SCRIPT)
    if fault == "none":
        assert (ended.code, ended.run["hang"], ended.verdict) == (0, None, None), ended.text
        return
    verdict, expected = ("late", "stopped by a signal") if fault == "stop" else ("missing", "gone (killed by SIGKILL")
    assert ended.verdict is not None, ended.text
    assert ended.verdict[1].startswith(f"pptrace: hang: {verdict}: rank 1 is {expected}"), ended.text
    assert ended.run["hang"]["edges"] == [
        {"rank": 0, "waits_for": [1], "call": "recv", "group": "default_pg", "seq": 3}
    ]


@pytest.mark.skipif(
    not ALL, reason="its ranks must be up before the time is over, however busy the machine: PPTRACE_ALL"
)
def test_a_timeout_gives_the_verdict_before_the_stacks(tmp_path: Path) -> None:
    ended = run(tmp_path, "sleep", 2, "--timeout", "25")
    assert ended.code == 124
    assert ended.verdict is not None, ended.text
    lines = ended.text.splitlines()
    begin = lines.index(ended.verdict[1])
    assert lines[begin + 1 : begin + 3] == [
        "  rank 0 waits in recv #6 from rank 1",
        "pptrace: still running after --timeout 25 s; where each rank is:",
    ]
    assert ended.run["hang"]["ranks"] == [1]


@pytest.mark.parametrize("number", range(50 if ALL else 1))
def test_a_healthy_run_has_no_verdict(tmp_path: Path, number: int) -> None:
    ended = run(tmp_path, "none", 2, "--hang-timeout", str(HANG_S))
    assert (ended.code, ended.run["hang"], ended.verdict) == (0, None, None), ended.text
