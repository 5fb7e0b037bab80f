"""Reason for which a rank has no trace, or one of fewer steps than requested: a line for a person, with what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

from instrument.launch.recording.optimizer_steps import OptimizerSteps

THEIRS = "the script's own torch.profiler"
_MOST_SHOWN = 6


def describe_activity(hooks: OptimizerSteps) -> str:
    """Describe what a script without a step did, as far as the hooks saw it."""
    if hooks.num_replays:
        replays = (
            "a CUDA graph was replayed"
            if hooks.num_replays == 1
            else f"CUDA graphs were replayed {hooks.num_replays} times"
        )
        return f"{replays}, in which no torch optimizer had stepped when they were captured"
    if hooks.num_backwards:
        passes = "a backward pass" if hooks.num_backwards == 1 else f"{hooks.num_backwards} backward passes"
        return f"{passes} ran, followed by no step of a torch optimizer and no change of parameters or gradients"
    if hooks.begun:
        return "modules ran forward, but there was no backward pass and no step of an optimizer (inference?)"
    return "no module ran, no backward pass, and no step of an optimizer"


def no_step(num_children: int, what_ran: str, *, are_recorded: bool = False, has_torchrun: bool = False) -> str:
    """``are_recorded``: the processes that it started, or some of them; ``has_torchrun``: it started torch's launcher."""
    if has_torchrun:
        return (
            "no step was seen in this process, which started torchrun: the ranks of that are not recorded. To record them, run "
            "its script, pptrace run -n RANKS SCRIPT, or have it start torchrun … -m instrument.launch -o DIR SCRIPT"
        )
    if num_children and are_recorded:
        count = "the process" if num_children == 1 else f"the {num_children} processes"
        return f"no step was seen in this process, nor in {count} that it started"
    if num_children:
        count = "a process" if num_children == 1 else f"{num_children} processes"
        return (
            f"no step was seen in this process, which started {count} of its own: those are not recorded. To record them, "
            f"start them as ranks: pptrace run -n {num_children} SCRIPT, which finds RANK and WORLD_SIZE in its environment"
        )
    return f'no step was seen: {what_ran}; pass --steps all, or mark the steps with pptrace.mark("step")'


def script_recorded(window: str, recorded: Sequence[int], kept: Sequence[int] | None) -> str:
    """``recorded`` are the steps that it recorded, ``kept`` those in the trace of it that is kept, None where it wrote none."""
    steps = f"steps {_windows(recorded)}" if recorded else "no whole step"
    line = f"{THEIRS}, which comes first, recorded {steps}, so pptrace recorded none of --steps {window}"
    if kept is None:
        remedy = "export a trace of it (export_chrome_trace, tensorboard_trace_handler), or run the script without it"
        return f"{line}, and it wrote no trace: {remedy}"
    return line if list(kept) == list(recorded) else f"{line}; kept is its trace of steps {_windows(kept)}"


def _windows(steps: Sequence[int]) -> str:
    """Steps in order as ``first:stop``, as of ``--steps``."""
    known = set(steps)
    firsts = [step for step in steps if step - 1 not in known]
    stops = [step + 1 for step in steps if step + 1 not in known]
    listed = [f"{first}:{stop}" for first, stop in zip(firsts, stops, strict=True)]
    return ", ".join([*listed[:_MOST_SHOWN], *(["…"] if len(listed) > _MOST_SHOWN else [])])


def ended_early(recorded: str, window: str, seen: int, *, later: bool) -> str:
    """``later``: a profiler of the script kept pptrace from the window that was asked for."""
    ended = f"the script ended after {steps_text(seen)}"
    if later:
        return f"recorded steps {recorded} instead of --steps {window}: {THEIRS} ran before, and {ended}"
    return f"recorded steps {recorded} of --steps {window}: {ended}"


def steps_text(steps: int) -> str:
    return "1 step" if steps == 1 else f"{steps} steps"


def in_window(seen: int) -> str:
    """The best window for a script of ``seen`` steps."""
    return f"{min(2, seen - 1)}:{min(5, seen)}"
