"""Runs injected faults into scripts with torch's own schedules and profiler: ``plain_faults.py [--write FILE.md]``.

Each rank is a process in a network namespace of its own, so that a slow link is one; needs root, ``ip`` and ``tc``. What a
finding says a fault costs is compared with what the same script, unrecorded, takes less without it: the difference of their
fastest steps or, of faults that come now and then, of the mean recorded step and the median step without.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pptrace.analysis.result import Finding, Severity
from pptrace.api.load import load
from pptrace.api.run import Run
from tests.support.plain_faulty import PlainSetting
from tests.support.programs import ROOT
from tests.support.slow_network import address, namespaces
from tools.faults import gain_of_half_size_ns
from tools.marked_tables import MarkedTable

_SCRIPT = ROOT / "tests" / "support" / "plain_faulty.py"
_BEGIN = "<!-- plain runs: made by tools/plain_faults.py -->"
_END = "<!-- end of plain runs -->"


@dataclass(frozen=True, slots=True)
class PlainCase:
    """A fault, or a slow link, and what the first finding has to say; ``clean`` is what takes its place without the fault."""

    name: str
    setting: PlainSetting
    cause: str
    where: Mapping[str, int | str] = field(default_factory=dict)
    link: tuple[int, int] | None = None
    clean: PlainSetting | None = None

    @property
    def without(self) -> PlainSetting:
        return self.clean or replace(self.setting, fault="", ranks=(), amount=0.0, chance=1.0)


_PIPELINE = PlainSetting()
_REPLICAS = PlainSetting(pp=2, dp=2, forward_s=0.04)
_SPORADIC = PlainSetting(steps=16)
_EXPERTS = PlainSetting(pp=2, dp=2, microbatches=4, rows=(4, 4), forward_s=0.008)


def _slow_link(schedule: str, forward_s: float = 0.03) -> PlainCase:
    setting = PlainSetting(schedule, forward_s=forward_s)
    return PlainCase(f"slow link, {schedule}", setting, "communication", {"link": "1-2"}, (1, 2))


CASES = (
    PlainCase("slow stage", replace(_PIPELINE, fault="slow", ranks=(2,), amount=1.5), "imbalance", {"stage": 2}),
    PlainCase("slow worker", replace(_REPLICAS, fault="slow", ranks=(3,), amount=1.5), "straggler", {"rank": 3}),
    PlainCase(
        "one slow op in fifty",
        replace(_SPORADIC, fault="slow", ranks=(0, 1, 2, 3), amount=5, chance=0.02),
        "jitter",
    ),
    _slow_link("Schedule1F1B"),
    _slow_link("ScheduleGPipe"),
    _slow_link("ScheduleInterleaved1F1B", 0.015),
    _slow_link("ScheduleZBVZeroBubble", 0.015),
    PlainCase("heavy last stage", replace(_PIPELINE, fault="slow", ranks=(3,), amount=1.5), "imbalance", {"stage": 3}),
    PlainCase("late start", replace(_PIPELINE, fault="late", ranks=(2,), amount=0.4), "host", {"rank": 2}),
    PlainCase(
        "GC pauses", replace(_SPORADIC, fault="pauses", ranks=(1,), amount=0.12, chance=0.08), "host", {"rank": 1}
    ),
    PlainCase(
        "other pauses", replace(_SPORADIC, fault="python", ranks=(1,), amount=0.12, chance=0.08), "host", {"rank": 1}
    ),
    PlainCase("Python between ops", replace(_PIPELINE, fault="python", ranks=(1,), amount=0.02), "host", {"rank": 1}),
    PlainCase("hot expert", replace(_EXPERTS, rows=(6, 2)), "straggler", {"rank": 2}, clean=_EXPERTS),
    PlainCase("slow rank of experts", replace(_EXPERTS, fault="slow", ranks=(1,), amount=2), "straggler", {"rank": 1}),
    PlainCase(
        "too few microbatches",
        PlainSetting(microbatches=4, forward_s=0.06),
        "structural",
        clean=_PIPELINE,
    ),
)


@dataclass(frozen=True, slots=True)
class PlainRun:
    """Findings of the traces of a run, and the lengths of its steps, ms, as the script timed them."""

    findings: Sequence[Finding]
    unrecorded_ms: Sequence[float]
    recorded_ms: Sequence[float]
    loaded: Run


def run(folder: Path, setting: PlainSetting, link: tuple[int, int] | None) -> PlainRun:
    """Run a setting, if its folder is not there yet, and analyse it."""
    if not folder.exists():
        folder.mkdir(parents=True)
        world = setting.pp * setting.dp
        with namespaces(world, link) as names:
            common = {"WORLD_SIZE": str(world), "MASTER_ADDR": address(0), "MASTER_PORT": "29500"}
            ranks = [
                subprocess.Popen(
                    ["ip", "netns", "exec", name, sys.executable, _SCRIPT, folder, json.dumps(asdict(setting))],
                    env={**os.environ, **common, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "eth0"},
                    stderr=subprocess.DEVNULL,
                )
                for rank, name in enumerate(names)
            ]
            codes = [process.wait(300) for process in ranks]
            if any(codes):
                raise RuntimeError(f"{folder.name} failed")
    times = json.loads((folder / "steps0.times").read_text())
    loaded = load(sorted(folder.glob("rank*.json.gz")))
    lengths = ([1e3 * s for s in times[name]] for name in ("unrecorded_s", "recorded_s"))
    return PlainRun(loaded.report.findings, *lengths, loaded)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The first finding of a case, beside what the run without the fault really takes less, ms."""

    case: PlainCase
    first: Finding | None
    gained_ms: float
    half_size_ns: int | None = None

    @property
    def stated_ms(self) -> float | None:
        ns = self.half_size_ns if self.case.cause == "structural" else self.first and self.first.gain_ns
        return None if ns is None else ns / 1e6

    @property
    def is_named(self) -> bool:
        evidence = self.first.evidence if self.first else {"where": {}}
        is_there = all(evidence["where"].get(place) == at for place, at in self.case.where.items())
        return evidence.get("cause") == self.case.cause and is_there


def outcome_of(case: PlainCase, folder: Path) -> Outcome:
    """Run a case, and what takes its place without the fault."""
    faulty = run(folder / case.name.replace(" ", "-"), case.setting, case.link)
    clean = run(folder / f"clean-{'-'.join(str(value) for value in asdict(case.without).values())}", case.without, None)
    named = [finding for finding in faulty.findings if finding.severity is not Severity.INFO]
    is_plain = case.cause == "structural"
    findings = faulty.findings if is_plain else named
    if case.setting.chance == 1:
        gained = min(faulty.unrecorded_ms) - min(clean.unrecorded_ms)
    else:
        gained = fmean(faulty.recorded_ms) - median(clean.recorded_ms)
    half_size_ns = gain_of_half_size_ns(faulty.loaded) if is_plain else None
    return Outcome(case, findings[0] if findings and not (is_plain and named) else None, gained, half_size_ns)


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The lines of the table."""
    yield "| fault | first finding | names it | gain stated, ms | gained, ms | error |"
    yield "|---|---|---|---:|---:|---:|"
    for each in outcomes:
        stated, error = "–", "–"
        if each.stated_ms is not None:
            stated, error = f"{each.stated_ms:.1f}", f"{each.stated_ms / each.gained_ms - 1:+.1%}"
        title, named = each.first.title if each.first else "none", "yes" if each.is_named else "no"
        yield f"| {each.case.name} | {title} | {named} | {stated} | {each.gained_ms:.1f} | {error} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", action="append", metavar="NAME", help="of the faults, may be given again")
    parser.add_argument("--folder", type=Path, help="where runs are kept, and taken from where they are there")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="put the table there, in place of the last one")
    options = parser.parse_args()
    marked = MarkedTable(options.write, _BEGIN, _END)
    marked.require_markers()
    outcomes = []
    with tempfile.TemporaryDirectory() as temporary:
        for case in CASES:
            if not options.only or case.name in options.only:
                began = time.monotonic()
                outcomes.append(outcome_of(case, options.folder or Path(temporary)))
                print(f"{case.name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    marked.write("\n".join(table(outcomes)))


if __name__ == "__main__":
    main()
