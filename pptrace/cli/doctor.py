"""``pptrace doctor``: installed versions, devices and profilers, and what they allow. Needs no torch."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import click
from msgspec import structs
from rich.console import Console
from rich.table import Table
from rich.text import Text

import pptrace
from pptrace.cli.options import COUNT, INPUT_PATH
from pptrace.cli.output import Outputs, report_console
from pptrace.cli.progress_bars import reading_bar
from pptrace.errors import PptraceError, UsageError
from pptrace.ingest.nsight.reader import read_nsight
from pptrace.marks import SpanKind, SpanMark, format_mark
from pptrace.nsys import exported_report, last_line, run_program

_INSTALL_TORCH = "torch is not installed: pip install 'pptrace[train]'"
_NSYS_S = 20
_TRIAL_S = 30.0
"""Time limit of trying nsys, s."""
_TRIALS = 3
"""Number of starts of nsys at most: several that start at once on one machine race, and one ends with an error."""
_TRIAL_RANGE = format_mark(SpanMark(SpanKind.STEP, 0))
_TRIAL = f"""
from instrument.nvtx_ranges import open_domain
domain = open_domain("pptrace")
if domain is not None:
    domain.push_range(domain.get_event_attributes(message={_TRIAL_RANGE!r}))
    domain.pop_range()
"""
_PACKAGES = ("nvtx", "numpy", "pandas", "plotly", "dash")


@dataclass(frozen=True, slots=True)
class Torch:
    """Version and abilities of PyTorch on this machine. Its import takes most of the doctor's time."""

    version: str
    cuda: str | None
    gpus: tuple[str, ...]
    backends: tuple[str, ...]
    kineto: bool
    cupti: bool


@dataclass(frozen=True, slots=True)
class NsysTrial:
    """Result of a trial of nsys: whether its report holds a range of pptrace's, with a detail or an advice."""

    works: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Machine:
    """Versions and abilities of this machine; None for what is absent."""

    python: str
    cores: int
    packages: tuple[tuple[str, str | None], ...]
    torch: Torch | None
    torch_problem: str | None
    """Reason for which torch cannot be used although it is installed."""
    nsys: str | None
    nsys_trial: NsysTrial | None = None
    """The result of recording a range with nsys; None where that was not tried."""


@dataclass(frozen=True, slots=True)
class Ability:
    """A task, whether it works on this machine, and why or how."""

    what: str
    works: bool
    detail: str


@click.command(name="doctor", short_help="Show what is installed here, or what is damaged in a recording.")
@click.argument("paths", nargs=-1, type=INPUT_PATH)
@click.option("--json", "json_file", metavar="FILE|-", help="Write the audit as JSON ('-': to stdout, nothing else).")
@click.option("--jobs", type=COUNT, help="Processes to read with [default: one per core].")
@click.option("--no-cache", is_flag=True, help="Neither use nor write the cache.")
def command(paths: tuple[Path, ...], json_file: str | None, jobs: int | None, no_cache: bool) -> None:
    """Show versions, devices, backends and profilers, and what that allows.

    With PATHS (trace files, a directory with one trace per rank, a run directory) audit the recording instead: events that the
    recorder lost, stretched or put elsewhere, in which ranks and steps, what they affect, and what cures it.
    """
    if paths:
        _audit(paths, json_file, jobs, cache=not no_cache)
        return
    if json_file is not None:
        raise UsageError("--json: give the traces that are to be audited: pptrace doctor PATH --json FILE")
    machine = examine()
    console = Console()
    console.print(facts_table(machine))
    console.print(abilities_table(list_abilities(machine)))


def _audit(paths: tuple[Path, ...], json_file: str | None, jobs: int | None, cache: bool) -> None:
    from pptrace.report.recording import audit_of, audit_text
    from pptrace.report.tables import warning_lines
    from pptrace.workflow.load import load

    outputs = Outputs({"--json": json_file})
    with reading_bar() as on_progress:
        report = load(paths, None, None, jobs, on_progress, cache, as_recorded=True).report
    found = audit_of(report)
    audit = None if found is None else [structs.asdict(entry) for entry in found]
    text = json.dumps({"schema": "pptrace.audit/1", "audit": audit}, indent=2)
    outputs.write({"--json": lambda: f"{text}\n"})
    if not outputs.take_stdout:
        report_console().print(audit_text(report, warning_lines(report)))


def examine() -> Machine:
    """Examine this machine."""
    torch, problem = None, None
    if importlib.util.find_spec("torch") is not None:
        try:
            torch = _examine_torch()
        except (ImportError, OSError, RuntimeError) as err:
            problem = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
    return Machine(
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        packages=tuple((name, _version(name)) for name in _PACKAGES),
        torch=torch,
        torch_problem=problem,
        nsys=(nsys := _nsys_version()),
        nsys_trial=_try_nsys() if nsys else None,
    )


def _examine_torch() -> Torch:
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, supported_activities

    activities = supported_activities()  # type: ignore[no-untyped-call]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    available = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "mpi": dist.is_available() and dist.is_mpi_available(),
    }
    return Torch(
        version=torch.__version__,
        cuda=torch.version.cuda,
        gpus=tuple(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus),
        backends=tuple(name for name, is_available in available.items() if is_available),
        kineto=ProfilerActivity.CPU in activities,
        cupti=ProfilerActivity.CUDA in activities,
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _nsys_version() -> str | None:
    if shutil.which("nsys") is None:
        return None
    try:
        done = subprocess.run(["nsys", "--version"], capture_output=True, text=True, timeout=_NSYS_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return "found, but 'nsys --version' fails"
    return done.stdout.strip().rpartition("version ")[2]


def _try_nsys() -> NsysTrial | None:
    """Record one range as a rank of ``pptrace run --profiler nsys`` does, and look for it in the report of nsys."""
    nsys, nvtx = shutil.which("nsys"), _version("nvtx")
    if nsys is None or nvtx is None:
        return None
    ends_at = time.monotonic() + _TRIAL_S

    def remaining_s() -> float:
        return max(ends_at - time.monotonic(), 1.0)

    with tempfile.TemporaryDirectory(prefix="pptrace-") as folder:
        stem = Path(folder) / "trial"
        options = ["--trace=nvtx", "--sample=none", "--cpuctxsw=none", "--export=sqlite", f"--output={stem}"]
        try:
            for _ in range(_TRIALS):
                code, output = run_program([nsys, "profile", *options, sys.executable, "-c", _TRIAL], remaining_s())
                export = exported_report(nsys, stem, remaining_s)
                if export is not None or code == 0:
                    break
            traces = read_nsight(export) if export is not None else ()
        except PptraceError as err:
            return NsysTrial(False, str(err).replace(f"{folder}{os.sep}", ""))
        if export is None:
            return NsysTrial(False, f"left no report of a trial (exit code {code}: {last_line(output)})")
        seen = any(name == _TRIAL_RANGE for trace in traces for name in trace.events.names)
    if seen:
        return NsysTrial(True, f"recorded a range of nvtx {nvtx}")
    return NsysTrial(False, f"recorded no range of nvtx {nvtx}: install a newer nsys, or 'nvtx<0.2.12'")


def list_abilities(machine: Machine) -> list[Ability]:
    """List what this machine allows, from analysing traces to profiling GPUs."""
    return [
        Ability("Analyse traces, open the dashboard", True, "needs no torch and no GPU"),
        *_training_abilities(machine),
        *_tracing_abilities(machine),
    ]


def _training_abilities(machine: Machine) -> Iterator[Ability]:
    torch = machine.torch
    if torch is None:
        why = f"torch cannot be imported: {machine.torch_problem}" if machine.torch_problem else _INSTALL_TORCH
        yield Ability("Train (pptrace run)", False, why)
        return
    gloo, nccl, gpus = "gloo" in torch.backends, "nccl" in torch.backends, len(torch.gpus)
    several = "one core only: ranks will wait for one another"
    if machine.cores > 1:
        several = f"up to {machine.cores} ranks with a core each"
    yield Ability("Train on CPU with gloo", gloo, several if gloo else "this torch was built without gloo")
    if gpus == 0:
        yield Ability("Train on GPUs", False, "no GPU here" if torch.cuda else "no GPU, or a CPU build of torch")
        return
    on_gpus = f"up to {gpus} {'rank' if gpus == 1 else 'ranks'} on this machine"
    yield Ability("Train on GPUs with NCCL", nccl, on_gpus if nccl else "this torch was built without NCCL")
    staged = "messages go through host memory over gloo, or through sockets by NCCL (--backend nccl-shared)"
    yield Ability("Several ranks on one GPU", gloo, staged if gloo else "needs gloo, which torch lacks")


def _tracing_abilities(machine: Machine) -> Iterator[Ability]:
    torch, trial = machine.torch, machine.nsys_trial
    if torch is not None:
        cpu = "ops and ranges, by torch's profiler" if torch.kineto else "this torch was built without Kineto"
        yield Ability("Trace the CPU (--profiler torch)", torch.kineto, cpu)
        works = torch.cupti and bool(torch.gpus)
        lacking = "this torch was built without CUPTI" if torch.gpus else "no GPU here"
        gpu = "kernels, copies and NCCL, through CUPTI" if works else lacking
        yield Ability("Trace GPU kernels (--profiler torch)", works, gpu)
    if machine.packages and dict(machine.packages).get("nvtx") is None:
        yield Ability("NVTX ranges", False, "nvtx is not installed: pip install 'pptrace[train]'")
    nsys = f"nsys {machine.nsys}, not tried" if trial is None else f"nsys {machine.nsys}: {trial.detail}"
    if machine.nsys is None:
        nsys = "nsys is not on PATH: install NVIDIA Nsight Systems"
    works = machine.nsys is not None and (trial is None or trial.works)
    yield Ability("Nsight Systems (--profiler nsys)", works, nsys)


def facts_table(machine: Machine) -> Table:
    """A table of the machine's versions and devices."""
    torch = machine.torch
    text = machine.torch_problem or "–"
    if torch is not None:
        text = f"{torch.version} ({f'CUDA {torch.cuda}' if torch.cuda else 'CPU build'})"
    profilers = {
        "Kineto (CPU)": torch and torch.kineto,
        "CUPTI (GPU)": torch and torch.cupti,
        f"nsys {machine.nsys}": machine.nsys,
    }
    table = Table(title="pptrace doctor", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("pptrace", pptrace.__version__)
    table.add_row("python", machine.python)
    table.add_row("torch", text)
    for name, version in machine.packages:
        table.add_row(name, version or "–")
    table.add_row("cores", str(machine.cores))
    table.add_row("GPUs", "\n".join(torch.gpus) if torch and torch.gpus else "none")
    table.add_row("backends", ", ".join(torch.backends) if torch and torch.backends else "–")
    table.add_row("profilers", ", ".join(name for name, is_there in profilers.items() if is_there) or "–")
    return table


def abilities_table(abilities: list[Ability]) -> Table:
    """A table of abilities."""
    table = Table(title="What that allows", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for ability in abilities:
        answer = Text("yes", style="green") if ability.works else Text("no", style="yellow")
        table.add_row(ability.what, answer, Text(ability.detail))
    return table
