"""Facts of a run besides its times: sizes, schedule, versions, options, settings of the environment, hosts and devices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from pptrace.analysis.compare.result import FactChange, Work
from pptrace.analysis.report import Report
from pptrace.analysis.shared_devices import core_waits_of
from pptrace.environment import read_environment
from pptrace.model.traces import DEVICE_NAMES
from pptrace.model.wording import listed

_SECRET = re.compile(
    r"(^|[-_.])(token|secret|password|passwd|credentials?|api[-_]?key|access[-_]?key|auth)($|[-_.])", re.I
)
"""Names of options whose values are nobody's business."""
_HIDDEN = "not shown"
_MOST_HOSTS = 4
_MOST_VALUES = 4
_SCRIPT = "script"
_NOT_GIVEN = "not given"
_WAITED = "waited for a core"

Facts = Mapping[str, str]
"""Facts of a run as text, by name."""


def facts_of(report: Report, of_ranks: Mapping[int, Mapping[str, Any]], run: Mapping[str, Any]) -> dict[str, str]:
    """The facts of a run.

    Args:
        report: of its traces.
        of_ranks: what each rank's recorder wrote into its trace, {} for others' traces.
        run: run.json, {} where there is none.
    """
    first = next((facts for _, facts in sorted(of_ranks.items()) if facts), {})
    share = core_wait_of(of_ranks)
    facts: dict[str, object] = {
        "framework": report.framework,
        "ranks": report.mesh.num_ranks,
        **report.mesh.axes,
        "schedule": report.schedule.name,
        "microbatches": report.schedule.num_microbatches,
        "stages": report.schedule.num_stages,
        "chunks per rank": report.schedule.num_chunks,
        "recorder": listed(dict.fromkeys(info.producer for info in report.inputs if info.producer)),
        "profiler": run.get("profiler"),
        **_named("version of", _either("versions", run, first)),
        **_named("model", _mapping(first.get("model"))),
        **read_environment(_either("environment", run, first)),
        **_options(run),
        "host": _distinct([*(facts.get("host") for facts in of_ranks.values()), run.get("host")]),
        "backend": _distinct(facts.get("backend") for facts in of_ranks.values()),
        _WAITED: "" if share is None else f"{share:.1%} of the time",
        "device": _distinct(name for facts in of_ranks.values() for name in _devices(facts)),
    }
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}


def differing(a: Sequence[Facts], b: Sequence[Facts]) -> tuple[FactChange, ...]:
    """The facts in which runs differ, whichever of the runs of A and of B, in the order of A's and then B's."""
    names = dict.fromkeys(name for run in (*a, *b) for name in run)
    changed = [name for name in names if len({_value(name, run) for run in (*a, *b)}) > 1]
    of_both = ((name, (_together(name, a), _together(name, b))) for name in changed)
    return tuple(
        FactChange(name, *(_HIDDEN if _SECRET.search(name) and of not in (None, _NOT_GIVEN) else of for of in both))
        for name, both in of_both
    )


_OF_WORK = (
    *("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary", "sequence"),
    *("experts", "topk", "expert_ffn"),
)
"""Facts of a model that say how much a microbatch computes."""


def work_of(a: Facts, b: Facts) -> Work:
    """Tell whether steps of two runs do the same work: by sizes, "layers 4 and 8, hidden 96 and 8", else by what was run."""
    of_models = [(name.replace("_", " "), a.get(f"model {name}"), b.get(f"model {name}")) for name in _OF_WORK]
    sizes = [("sequences a step", _sequences(a), _sequences(b)), *of_models]
    differing = [f"{name} {of_a} and {of_b}" for name, of_a, of_b in sizes if None not in (of_a, of_b) and of_a != of_b]
    if differing:
        return Work(False, ", ".join(differing))
    alone = [name for name, *both in sizes if both[0] != both[1]]
    if not alone and all(both[0] for name, *both in sizes if name in _SIZES):
        return Work(True, "batch and model have the same sizes")
    if unknown := [name for name, run in (("A", a), ("B", b)) if _SCRIPT not in run]:
        return Work(None, f"batch and model are not known of {' and '.join(unknown)}")
    of_command = [name for name in dict.fromkeys((*a, *b)) if name == _SCRIPT or _is_option(name)]
    if others := [name for name in of_command if a.get(name) != b.get(name)]:
        return Work(None, f"batch or model are not known, and the commands differ in {listed(others, _MOST_VALUES)}")
    if a.get("ranks") != b.get("ranks"):
        return Work(
            None, f"one command on {a.get('ranks')} and {b.get('ranks')} ranks may share a batch or multiply it"
        )
    return Work(True, "the same command on as many ranks")


_SIZES = ("sequences a step", "layers", "hidden", "sequence")
"""Sizes that tell, where they are known, how much a step computes."""


def _sequences(run: Facts) -> str | None:
    """Sequences that all pipelines take in a step; None where that is not known."""
    counts = (run.get("microbatches", ""), run.get("model microbatch_size", ""), run.get("dp", "1"))
    return str(prod(map(int, counts))) if all(map(str.isdecimal, counts)) else None


def _together(name: str, runs: Sequence[Facts]) -> str | None:
    """A fact of the runs of a side: each value once; None where no run has it."""
    values = [value for run in runs if (value := _value(name, run)) is not None]
    if not values:
        return None
    lacking = len(runs) - len(values)
    rest = f" (not in {lacking} of {len(runs)} runs)" if lacking else ""
    if name == _WAITED and len(set(values)) > 1:
        least, *_, most = sorted(values, key=lambda value: float(value.partition("%")[0]))
        return f"{least.partition(' ')[0]} to {most}{rest}"
    return listed(dict.fromkeys(values), _MOST_VALUES) + rest


def _value(name: str, run: Facts) -> str | None:
    """A fact of a run. An option that a known command lacks was not given, which leaves it to the script."""
    return run.get(name, _NOT_GIVEN if _is_option(name) and _SCRIPT in run else None)


def _either(name: str, *holders: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping of this name of the first that has one."""
    return next((held for holder in holders if (held := _mapping(holder.get(name)))), {})


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _named(prefix: str, values: Mapping[str, Any]) -> dict[str, object]:
    """Plain values, each named after what it is of."""
    plain = {name: value for name, value in values.items() if isinstance(value, str | int | float)}
    return {f"{prefix} {name}".strip(): value for name, value in plain.items()}


def _options(run: Mapping[str, Any]) -> dict[str, str]:
    """The script and its options as run.json has them: ``--layers`` with its values, all others together."""
    command = [part for part in run.get("command") or () if isinstance(part, str)]
    options: dict[str, list[str]] = {}
    name = _SCRIPT
    for part in command:
        if _is_option(part):
            name, _, value = part.partition("=")
            options.setdefault(name, []).extend([value] if value else [])
        else:
            options.setdefault(name, []).append(part)
    return {name: " ".join(values) or "set" for name, values in options.items()}


def _is_option(part: str) -> bool:
    """Return whether this names an option; a negative number does not."""
    return re.match(r"--?[A-Za-z]", part) is not None


def _devices(facts: Mapping[str, Any]) -> Sequence[object]:
    """The kind of a rank's device, its name without its number; else the names that its recorder gives those of its host."""
    device, names = facts.get("device"), facts.get(DEVICE_NAMES)
    if isinstance(device, str):
        return [re.sub(r"^(\w+):\d+", r"\1", device)]
    return names if isinstance(names, list) else []


def _distinct(values: Iterable[object]) -> str:
    """Each different text once."""
    texts: Sequence[str] = sorted({value for value in values if isinstance(value, str) and value})
    return listed(texts, _MOST_HOSTS)


def core_wait_of(of_ranks: Mapping[int, Mapping[str, Any]]) -> float | None:
    """The share of the time for which a rank was ready to run and had no core, the mean over ranks; None where none tells."""
    shares = [wait.share for wait in core_waits_of(of_ranks)]
    return sum(shares) / len(shares) if shares else None
