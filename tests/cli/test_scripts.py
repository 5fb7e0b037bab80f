"""Scripts as people write them: what they print, how they end and what they find is the same with and without pptrace."""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.extent import ALL
from tests.support.programs import ROOT, Ended, run_command

pytestmark = pytest.mark.processes
LIMIT_S = 120
PLAIN = (sys.executable,)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")

OWN_PROFILER = """
import sys, torch, pptrace
from torch.profiler import ProfilerActivity, profile, schedule
weight = torch.ones(4, requires_grad=True)
def train(step):
    with pptrace.mark("step"), pptrace.mark("forward"):
        (weight * step).sum().backward()
def found(own):
    print(len(own.events()), sorted((event.key, event.count) for event in own.key_averages()))
CPU = [ProfilerActivity.CPU]
if sys.argv[1] == "middle":
    for step in range(4): train(step)
    with profile(activities=CPU) as own:
        for step in range(4, 6): train(step)
    found(own)
    for step in range(6, 9): train(step)
elif sys.argv[1] == "scheduled":
    with profile(activities=CPU, schedule=schedule(wait=0, warmup=1, active=2, repeat=2), on_trace_ready=found) as own:
        for step in range(9):
            train(step)
            own.step()
elif sys.argv[1] == "cycles":
    def export(own):
        own.export_chrome_trace(f"{sys.argv[2]}.{own.step_num}")
        found(own)
    with profile(activities=CPU, schedule=schedule(wait=0, warmup=1, active=2), on_trace_ready=export) as own:
        for step in range(9):
            train(step)
            own.step()
elif sys.argv[1] == "throughout":
    with profile(activities=CPU) as own:
        for step in range(9): train(step)
    found(own)
elif sys.argv[1] == "exported":
    with profile(activities=CPU) as own:
        for step in range(9): train(step)
    own.export_chrome_trace(sys.argv[2])
    found(own)
"""
ENDING = """
import os, signal, sys, time
print("arguments", sys.argv, sys.path[0] == os.path.dirname(__file__), __name__, __file__, __spec__, __package__)
how = sys.argv[1]
if how == "code": sys.exit(7)
if how == "text": sys.exit("no data here")
if how == "raise": raise ValueError("the loss is not finite")
if how == "_exit": os._exit(3)
if how == "handler": signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved a checkpoint") or 5))
if how in ("handler", "terminated"):
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)
print("end")
"""
FORKING = """
import os, sys, torch, pptrace
weight = torch.ones(4, requires_grad=True)
def train():
    with pptrace.mark("step"):
        (weight * 2).sum().backward()
def child_code(then):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        with torch.no_grad():
            for _ in range(9):
                with pptrace.mark("step"): torch.ones(2) + 1
        then()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
def fails():
    raise KeyError("in the child")
for step in range(3): train()
print("children", child_code(lambda: sys.exit(9)), child_code(fails), child_code(lambda: os._exit(4)))
for step in range(3): train()
print("end")
"""
COMPILED = """
import os, torch, torch.distributed as dist, torch._dynamo, pptrace
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = torch.compile(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), backend="eager")
@torch.compile(fullgraph=True, backend="eager")
def reduced(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1
@torch.compile(fullgraph=True, backend="eager")
def marked(x):
    with pptrace.mark("forward", microbatch=1):
        return x * 3
for step in range(5):
    with pptrace.mark("step"):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        print(loss.item().hex(), reduced(torch.ones(3) * step).sum().item().hex(), marked(loss).item().hex())
counters = torch._dynamo.utils.counters
print(dict(counters["stats"]), dict(counters["graph_break"]), dict(counters["recompiles"]))
dist.destroy_process_group()
"""
HAND_MADE = """
import torch, torch.distributed as dist
try:
    from pptrace import mark
except ImportError:
    import contextlib
    mark = lambda *_, **__: contextlib.nullcontext()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
def forward(microbatch):
    x = torch.randn(8, 64)
    if rank:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, rank - 1)]): work.wait()
        x.requires_grad_()
    with mark("forward"):
        y = model(x)
        if rank == world - 1:
            y = y.square().mean()
            print("loss", y.item().hex())
    if rank < world - 1:
        sent.append(dist.isend(y.detach(), rank + 1))
    saved.append((x, y))
def backward(microbatch):
    x, y = saved.pop(0)
    grad = None
    if rank < world - 1:
        grad = torch.empty(8, 64)
        dist.recv(grad, rank + 1)
    with mark("backward"):
        torch.autograd.backward(y, grad)
    if rank:
        sent.append(dist.isend(x.grad, rank - 1))
for step in range(5):
    saved, sent = [], []
    for microbatch in range(4): forward(microbatch)
    for microbatch in range(4): backward(microbatch)
    for work in sent: work.wait()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
            parameter.grad = None
dist.destroy_process_group()
"""


def run(command: tuple[str, ...], script: Path, *arguments: str, anew: bool = False, **environ: str) -> Ended:
    """Run a script.

    ``anew``: each process begins as a new interpreter, and not as a fork of one that has imported torch.
    """
    environ = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "NO_COLOR": "1", **environ}
    return run_command([*command, str(script), *arguments], LIMIT_S, ROOT, environ, forked=not anew)


PROFILED_ON_ONE_RANK = """
import contextlib, os, torch, torch.distributed as dist, pptrace
from torch.profiler import ProfilerActivity, profile
dist.init_process_group("gloo")
weight = torch.ones(4, requires_grad=True)
own = profile(activities=[ProfilerActivity.CPU]) if os.environ["RANK"] == "0" else contextlib.nullcontext()
def train(steps):
    for step in steps:
        with pptrace.mark("step"):
            weight.grad = None
            (weight * step).sum().backward()
            dist.all_reduce(weight.grad)
with own:
    train(range(5))
train(range(5, 12))
if os.environ["RANK"] == "0": print(sorted((event.key, event.count) for event in own.key_averages() if "mul" in event.key))
dist.destroy_process_group()
"""


def recorded(run_dir: Path, *options: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "instrument.launch", "-o", str(run_dir), *options)


def written(tmp_path: Path, text: str) -> Path:
    script = tmp_path / "script.py"
    script.write_text(text)
    return script


def trace_of(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        return json.load(file)


@pytest.mark.parametrize(
    ("when", "kept", "line"),
    [
        ("middle", [2, 4], "recorded steps 2:4 of --steps 2:5: the script's own torch.profiler began then"),
        ("scheduled", [6, 9], "recorded steps 6:9 instead of --steps 2:5: the script's own torch.profiler ran before"),
        (
            "throughout",
            None,
            "recorded steps 0:9, so pptrace recorded none of --steps 2:5, and it wrote no trace",
        ),
        ("exported", None, "recorded steps 0:9, so pptrace recorded none of --steps 2:5\n"),
        (
            "cycles",
            None,
            "recorded steps 1:3, 4:6, 7:9, so pptrace recorded none of --steps 1:4; kept is its trace of steps 1:3",
        ),
    ],
)
def test_a_profiler_of_the_script_finds_what_it_finds_without_us(
    tmp_path: Path, when: str, kept: list[int] | None, line: str
) -> None:
    script = written(tmp_path, OWN_PROFILER)
    plain = run(PLAIN, script, when, str(tmp_path / "plain.json"))
    window = "1:4" if when == "cycles" else "2:5"
    ours = run(recorded(tmp_path / "run", "--steps", window), script, when, str(tmp_path / "ours.json"))
    assert (plain.code, ours.code) == (0, 0), ours.err
    assert plain.out == ours.out
    assert "aten::mul" in plain.out
    assert line in ours.err
    trace = tmp_path / "run" / "rank0.json.gz"
    assert trace.exists() == (kept is not None)
    if kept is not None:
        assert trace_of(trace)["pptrace"]["steps"] == kept
    copy = tmp_path / "run" / "script_profiler" / "rank0.json"
    assert copy.exists() == (when in ("exported", "cycles"))
    if copy.exists():
        own = "ours.json.3" if when == "cycles" else "ours.json"  # the one of most steps of the window
        assert copy.read_bytes() == (tmp_path / own).read_bytes()
        assert "pp1:" not in copy.read_text()


def test_all_ranks_record_the_steps_after_a_profiler_that_the_script_runs_on_one(tmp_path: Path) -> None:
    script = written(tmp_path, PROFILED_ON_ONE_RANK)
    program = str(Path(sys.executable).parent / "pptrace")
    ours = run((program, "run", "-n", "2", "-o", str(tmp_path / "run"), "--steps", "2:4", "--no-analyze"), script)
    assert ours.code == 0, ours.err
    assert "('aten::mul', 10)" in ours.out  # five forwards and five backwards
    kept = [trace_of(tmp_path / "run" / f"rank{rank}.json.gz")["pptrace"]["steps"] for rank in range(2)]
    assert kept == [[6, 8], [6, 8]]
    assert "recorded steps 6:8 instead of --steps 2:4: the script's own torch.profiler ran before" in ours.err


@pytest.mark.parametrize("how", ["code", "text", "raise", "_exit", "handler", "terminated", "end"])
def test_a_recorded_script_ends_as_it_would_alone(tmp_path: Path, how: str) -> None:
    script = written(tmp_path, ENDING)
    plain = run(PLAIN, script, how, anew=True)
    ours = run(recorded(tmp_path / "run", "--profiler", "none"), script, how)
    assert (ours.code, ours.out) == (plain.code, plain.out)
    assert [
        line for line in ours.err.splitlines() if not line.startswith(("pptrace:", "USDT:"))
    ] == plain.err.splitlines()


def test_a_forked_child_records_nothing_and_ends_as_it_would_alone(tmp_path: Path) -> None:
    script = written(tmp_path, FORKING)
    plain = run(PLAIN, script)
    ours = run(recorded(tmp_path / "run", "--steps", "2:5"), script)
    assert (ours.code, ours.out) == (plain.code, plain.out) == (0, "children 9 1 4\nend\n")
    assert "KeyError: 'in the child'" in ours.err
    content = trace_of(tmp_path / "run" / "rank0.json.gz")
    marks = [event for event in content["traceEvents"] if event.get("name", "").startswith("pp1:STEP")]
    assert content["pptrace"]["steps"] == [2, 5]
    assert [mark["name"] for mark in marks] == ["pp1:STEP step=2", "pp1:STEP step=3", "pp1:STEP step=4"]


def test_compiled_code_is_compiled_as_it_would_be_alone(tmp_path: Path) -> None:
    script = written(tmp_path, COMPILED)
    plain = run(PLAIN, script)
    ours = run(recorded(tmp_path / "run", "--steps", "1:3"), script)
    assert (ours.code, ours.out) == (plain.code, plain.out), ours.err
    assert "global hooks" not in ours.err


def test_a_pipeline_by_hand_with_marks_is_reported_and_its_losses_are_bit_identical(tmp_path: Path) -> None:
    script = written(tmp_path, HAND_MADE)
    program = str(Path(sys.executable).parent / "pptrace")
    runs = [
        run((program, "run", "-n", "2", "-o", str(tmp_path / "hooks"), "--steps", "1:3"), script),
        run((program, "run", "-n", "2", "-o", str(tmp_path / "none"), "--no-hooks", "--profiler", "none"), script),
        run(TORCHRUN, script),
    ]
    assert [ended.code for ended in runs] == [0, 0, 0], runs[0].err
    losses = [[line[line.index("loss") :] for line in ended.out.splitlines() if "loss" in line] for ended in runs]
    assert losses[0] == losses[1] == losses[2]
    assert len(losses[0]) == 20
    report = json.loads(run((program, "analyze", "--ops", "--json", "-"), tmp_path / "hooks").out)
    assert report["schedule"]["name"] == "gpipe"
    assert report["mesh"]["pp"] == 2
    for step in report["steps"]:
        for rank in step["ranks"]:
            ops = [(op["kind"], op["stage"], op["microbatch"]) for op in rank["ops"] if op["kind"] in "FB"]
            assert ops == [(kind, rank["rank"], mb) for kind in "FB" for mb in range(4)]


def test_ranks_that_torchrun_starts_write_one_run(tmp_path: Path) -> None:
    script = written(tmp_path, HAND_MADE)
    command = (*TORCHRUN, "-m", "instrument.launch", "--steps", "1:3")
    ended = run(command, script, anew=ALL, PPTRACE_RUN_DIR=str(tmp_path / "run"))
    assert ended.code == 0, ended.err
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["rank0.json.gz", "rank1.json.gz"]
    again = run(command, script, PPTRACE_RUN_DIR=str(tmp_path / "run"))
    assert again.code != 0
    assert "holds a trace of rank" in again.err


ACCELERATE = """
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
rows = torch.utils.data.TensorDataset(torch.randn(96, 16))
model, optimizer, data = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(rows, batch_size=4))
losses = []
for (x,) in data:
    with accelerator.accumulate(model):
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item().hex())
if accelerator.is_main_process:
    print("loss", losses)
"""
TRAINER = """
import sys, tempfile, torch
from transformers import Trainer, TrainingArguments
torch.manual_seed(0)
class Model(torch.nn.Linear):
    def forward(self, x, labels=None):
        return {"loss": (super().forward(x).squeeze(-1) - labels).square().mean()}
rows = [{"x": torch.full((8,), float(i % 5)), "labels": torch.tensor(float(i % 3))} for i in range(96)]
options = dict(report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, logging_steps=1, max_steps=6)
arguments = TrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=4, gradient_accumulation_steps=2, **options)
trainer = Trainer(Model(8, 1), arguments, train_dataset=rows)
trainer.train()
if trainer.is_world_process_zero():
    print("loss", [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
"""
LIGHTNING = """
import torch, lightning
torch.manual_seed(0)
losses = []
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
    def training_step(self, batch, index):
        loss = self.layer(batch[0]).square().mean()
        losses.append(loss.item().hex())
        return loss
    def validation_step(self, batch, index):
        self.layer(batch[0])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)
def data():
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(48, 8)), batch_size=4)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=6, val_check_interval=2, **quiet)
trainer.fit(Model(), data(), data())
if trainer.global_rank == 0:
    print("loss", losses)
"""


@pytest.mark.parametrize(
    ("package", "text"), [("accelerate", ACCELERATE), ("transformers", TRAINER), ("lightning", LIGHTNING)]
)
def test_the_loops_of_others_train_as_under_torchrun_and_their_steps_are_seen(
    tmp_path: Path, package: str, text: str
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    script = written(tmp_path, text)
    entry = "from pptrace.cli.main import main; main()"
    options = ("run", "-n", "2", "-o", str(tmp_path / "run"), "--no-analyze", "--steps", "1:3")
    ours = run((sys.executable, "-c", entry, *options), script)
    assert ours.code == 0, ours.err
    plain = run(TORCHRUN, script)
    losses = [
        sorted(line[line.index("loss") :] for line in ended.out.splitlines() if "loss" in line)
        for ended in (ours, plain)
    ]
    assert losses[0] == losses[1] != []
    for rank in range(2):
        assert trace_of(tmp_path / "run" / f"rank{rank}.json.gz")["pptrace"]["steps"] == [1, 3]
