"""``pptrace run``: start a training script on several ranks, profile some of its steps, analyse the traces."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pptrace.api.options import read_bytes
from pptrace.cli.options import GIVEN_PATH, NUMBER, WHOLE
from pptrace.errors import PptraceError, UsageError

if TYPE_CHECKING:
    from instrument.launch.launcher import RunResult
    from instrument.launch.options import RunOptions

_BUDGET = "2GB"
"""The budget of traces, and of memory for recording on a host, where ranks are chosen."""


@click.command(
    name="run",
    context_settings={"allow_interspersed_args": False},
    short_help="Run a training script on several ranks and profile it.",
)
@click.option("-n", "--nproc-per-node", "nproc", type=WHOLE, default=1, show_default=True, help="Ranks on this node.")
@click.option("--nnodes", type=WHOLE, default=1, show_default=True, help="Nodes; run this command on each.")
@click.option("--node-rank", type=WHOLE, default=None, help="This node's number, from 0; with --nnodes.")
@click.option("--rdzv-endpoint", metavar="HOST:PORT", help="Where the first node listens; with --nnodes.")
@click.option("-o", "--output", type=GIVEN_PATH, help="Run directory [default: pptrace_runs/TIME-SCRIPT].")
@click.option(
    "--profiler", default="torch", show_default=True, metavar="torch|nsys|none", help="Profiler that records."
)
@click.option("--steps", metavar="A:B", help="Steps A to B-1 are profiled; or 'all'.  [default: 4:14]")
@click.option(
    "--record",
    "level",
    default="auto",
    show_default=True,
    metavar="auto|full|light|shapes",
    help="light: ranges of ops and calls, and the device; full: operators too, which slows the run; shapes: with the "
    "shapes of their inputs, which tell FLOPs; auto: light where a pipeline's runtime names its ops.",
)
@click.option(
    "--profile-ranks",
    default="all",
    show_default=True,
    metavar="R,R-R,…|auto",
    help="Ranks that are recorded: 0,4,8-11; auto: chosen within --profile-budget.",
)
@click.option(
    "--profile-budget",
    metavar="BYTES",
    help="With --profile-ranks auto: bytes of all traces, and of memory for recording on a host, each.  [default: 2GB]",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=NUMBER,
    default=None,
    metavar="SECONDS",
    help="End the run then, and say where it hangs.",
)
@click.option(
    "--no-hooks", is_flag=True, help="Wrap no functions of imported packages; --steps is then 'all' by default."
)
@click.option(
    "--hang-timeout",
    "hang_timeout_s",
    type=NUMBER,
    default=None,
    metavar="SECONDS",
    help="End the run when ranks wait and none makes a call, ends a step or computes for so long, and say who is to blame.",
)
@click.option("--memory", is_flag=True, help="Record every allocation of tensors in these steps, which slows them.")
@click.option(
    "--live",
    is_flag=True,
    help="Write a small record of every step while the run goes on, for `pptrace live` and the dashboard.",
)
@click.option("--no-analyze", is_flag=True, help="Only record.")
@click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    script: str,
    args: tuple[str, ...],
    module: bool,
    output: Path | None,
    node_rank: int | None,
    steps: str | None,
    no_hooks: bool,
    profile_ranks: str,
    profile_budget: str | None,
    no_analyze: bool,
    **options: Any,
) -> None:
    """Run SCRIPT with ARGS on several ranks, profile some of its steps, and analyse the traces.

    The script needs no change: it finds RANK, WORLD_SIZE and the like in its environment, as with torchrun, and its
    steps are recognised by its optimizer. Options come before SCRIPT.
    """
    from instrument.launch.options import RunOptions, check_options, default_run_dir
    from instrument.launch.window import chosen_window, parse_ranks

    full_command = ("-m", script, *args) if module else (script, *args)
    if options["nnodes"] > 1 and (node_rank is None or output is None):
        raise UsageError("--nnodes: several nodes need --node-rank K and -o DIR, and the same DIR on each")
    is_auto = profile_ranks == "auto"
    if profile_budget is not None and not is_auto:
        raise UsageError("--profile-budget: ranks are chosen within it by --profile-ranks auto: give both")
    run_options = RunOptions(
        command=full_command,
        run_dir=output or default_run_dir(full_command),
        node_rank=node_rank or 0,
        window=chosen_window(steps, hooks=not no_hooks),
        hooks=not no_hooks,
        ranks=None if is_auto else parse_ranks(profile_ranks),
        budget=read_bytes("--profile-budget", profile_budget or _BUDGET) if is_auto else 0,
        **options,
    )
    check_options(run_options)
    missing = [name for name in ("torch", "nvtx") if importlib.util.find_spec(name) is None]
    if missing:
        raise PptraceError(f"pptrace run needs {' and '.join(missing)}: pip install 'pptrace[train]'")
    ctx.exit(_run(run_options, analyze=not no_analyze))


def _run(options: RunOptions, *, analyze: bool) -> int:
    """Run, report and analyse; returns the exit code."""
    from instrument.launch.launcher import describe_ranks, launch
    from instrument.launch.output import Terminal

    if options.profiler == "nsys":
        from instrument.launch.nsys import launch_under_nsys

        result = launch_under_nsys(options)
    else:
        result = launch(options, Terminal())
    for line in describe_ranks(result):
        click.echo(f"pptrace: {line}", err=True)
    if options.budget:
        from pptrace.ingest.inputs.resolve import run_of

        if chosen := run_of(options.run_dir).get("profile_ranks"):
            ranks = ", ".join(map(str, chosen["ranks"]))
            click.echo(f"pptrace: --profile-ranks auto recorded rank {ranks}: {chosen['why']}", err=True)
    if options.live:
        from pptrace.report.live import cost_lines
        from pptrace.workflow.live.follow import cost_of_run

        for line in cost_lines(cost_of_run(result.run_dir)):
            click.echo(f"pptrace: {line}", err=True)
    # A node sees only the end of its ranks; the run is analysed when all have written their traces.
    _finish(result, analyze=analyze and options.nnodes == 1, profiled=options.profiler != "none", live=options.live)
    if options.nnodes > 1:
        click.echo(f"when all nodes have ended: {_program()} analyze {shlex.quote(str(result.run_dir))}")
    return result.end.exit_code


def _finish(result: RunResult, *, analyze: bool, profiled: bool, live: bool) -> None:
    traces, origin = (result.traces, "") if result.traces else (result.script_traces, " of the script's own profiler")
    count = len(traces)
    if live:
        click.echo(f"{_program()} live {shlex.quote(str(result.run_dir))}")
    if not count:
        if profiled:
            click.echo(f"pptrace: no trace was recorded; {result.run_dir}/run.json says how the run went", err=True)
        return
    click.echo(f"pptrace: {count} {'trace' if count == 1 else 'traces'}{origin} in {result.run_dir}", err=True)
    if analyze:
        from pptrace.cli.analyze import analyze_and_print

        try:
            analyze_and_print([result.run_dir])
        except PptraceError as err:  # the run's exit code stays
            click.echo(f"pptrace: the traces are kept, but could not be analysed: {err}", err=True)
    click.echo(f"{_program()} dashboard {shlex.quote(str(result.run_dir))}")


def _program() -> str:
    """The command by which the user can call pptrace: its name, or its path where the name is not on PATH."""
    called = Path(sys.argv[0])
    on_path = shutil.which("pptrace")
    is_program = called.name == "pptrace" and called.exists()
    return str(called) if is_program and not (on_path and Path(on_path).samefile(called)) else "pptrace"
