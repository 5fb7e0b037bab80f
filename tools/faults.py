"""Run real pipelines with injected faults, and write what pptrace's first finding says of each: ``faults.py [--healthy N]``.

The ranks are processes on this machine that talk by gloo; their ops sleep, so that two cores keep time for four. The gain that a
finding states is compared with what steps really get back, against the same run without the fault, whose steps all do the same.
Other processes make steps longer, never shorter: of steps that all have the same to do the fastest counts. The mean of the 8
steps of one run has varied by 60 ms with a single disturbed step, where the gain that was stated varied by 5.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from instrument.examples.faults import Fault
from pptrace.analysis.report import Report
from pptrace.analysis.result import Finding, Severity
from pptrace.api.load import load
from pptrace.api.run import Run
from pptrace.schedule.registry import get
from tests.support.programs import ROOT, pptrace
from tools.marked_tables import MarkedTable

SCRIPT = ROOT / "instrument" / "examples" / "train_gpt.py"
_MODEL = ("--hidden", "8", "--heads", "2", "--seq", "4", "--microbatch-size", "1", "--clip-grad", "1")
_WARMUP_STEPS = 2


@dataclass(frozen=True, slots=True)
class Setting:
    """Run without a fault: ops sleep ``forward_ms`` and twice as much; receives are posted ``prefetch`` ops ahead.

    With ``routes`` (``balanced`` or ``hot``) layers have four experts on two ranks, which sleep for each of their rows instead.
    """

    pp: int = 4
    dp: int = 1
    microbatches: int = 8
    forward_ms: float = 30
    schedule: str = "1f1b"
    steps: int = 8
    prefetch: int | None = None
    routes: str = ""

    @property
    def arguments(self) -> tuple[str, ...]:
        sizes = ("--pp", str(self.pp), "--dp", str(self.dp), "--microbatches", str(self.microbatches))
        sleep = ("--sleep-forward", str(self.forward_ms), "--sleep-backward", str(2 * self.forward_ms))
        layers = self.pp * get(self.schedule).default_chunks
        ahead = () if self.prefetch is None else ("--prefetch", str(self.prefetch))
        if self.routes:
            sleep = ("--experts", "4", "--ep", "2", "--force-routes", self.routes, "--sleep-rows", "8")
        return (*_MODEL, "--layers", str(layers), *sizes, *sleep, "--schedule", self.schedule, *ahead)

    @property
    def name(self) -> str:
        ahead = "" if self.prefetch is None else f"-ahead{self.prefetch}"
        ahead += f"-{self.routes}" if self.routes else ""
        return f"{self.schedule}-pp{self.pp}-dp{self.dp}-m{self.microbatches}-f{self.forward_ms:g}-n{self.steps}{ahead}"


@dataclass(frozen=True, slots=True)
class Case:
    """A fault, and what the first finding has to say: its cause, where it is, and the reason where it has one.

    ``clean`` is the setting without the fault, where that is another one.
    """

    name: str
    fault: Fault | None
    cause: str
    where: Mapping[str, int | str] = field(default_factory=dict)
    reason: str | None = None
    setting: Setting = Setting()
    clean: Setting | None = None


_REPLICAS = Setting(pp=2, dp=2, forward_ms=40)
_SPORADIC = Setting(steps=18)
_INTERLEAVED = Setting(schedule="interleaved-1f1b", forward_ms=15)
_ZERO_BUBBLE = Setting(schedule="zb-h1", forward_ms=20)
_BALANCED = Setting(pp=2, dp=2, microbatches=4, routes="balanced")
_LINK = Fault("link", (1, 2), 0.04)
_SLOW_LINK = ("communication", {"link": "1-2"}, "slow link")
CASES = (
    Case("slow stage", Fault("slow", (2,), 1.5), "imbalance", {"stage": 2}),
    Case("slow worker", Fault("slow", (3,), 1.5), "straggler", {"rank": 3}, setting=_REPLICAS),
    Case("one slow op in fifty", Fault("slow", (0, 1, 2, 3), 5, 0.02), "jitter", {}, "long ops", _SPORADIC),
    Case("slow link", _LINK, *_SLOW_LINK),
    Case("slow link, receives that block", _LINK, *_SLOW_LINK, setting=Setting(prefetch=0)),
    Case("slow link, interleaved-1f1b", _LINK, *_SLOW_LINK, setting=_INTERLEAVED),
    Case(
        "slow link, interleaved-1f1b, receives that block",
        _LINK,
        *_SLOW_LINK,
        setting=replace(_INTERLEAVED, prefetch=0),
    ),
    Case("slow link, zb-h1", _LINK, *_SLOW_LINK, setting=_ZERO_BUBBLE),
    Case("slow link, zb-h1, receives that block", _LINK, *_SLOW_LINK, setting=replace(_ZERO_BUBBLE, prefetch=0)),
    Case("heavy last stage", Fault("slow", (3,), 1.5), "imbalance", {"stage": 3}),
    Case("late start", Fault("late", (2,), 0.4), "host", {"rank": 2}, "late start"),
    Case("GC pauses", Fault("pauses", (1,), 0.12, 0.08), "host", {"rank": 1}, "garbage collection", _SPORADIC),
    Case("other pauses", Fault("python", (1,), 0.12, 0.08), "host", {"rank": 1}, "pauses", _SPORADIC),
    Case("Python between ops", Fault("python", (1,), 0.02), "host", {"rank": 1}, "late launches"),
    Case(
        "hot expert",
        None,
        *("imbalance", {"axis": "ep", "rank": 0}, "unequal routes"),
        setting=replace(_BALANCED, routes="hot"),
        clean=_BALANCED,
    ),
    Case("slow rank of experts", Fault("slow", (1,), 2), "straggler", {"rank": 1}, None, _BALANCED),
    Case(
        "too few microbatches",
        None,
        "structural",
        setting=Setting(microbatches=2, forward_ms=80, steps=8),
        clean=Setting(microbatches=4, forward_ms=40, steps=8),
    ),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """First finding of the report of a faulty run, compared with the clean run."""

    case: Case
    findings: Sequence[Finding]
    step_ms: float
    clean_ms: float
    half_size_ns: int | None = None

    @property
    def first(self) -> Finding | None:
        """The first finding; structural ones, which every run has, come after those of faults."""
        wanted = Severity.INFO if self.case.cause == "structural" else Severity.WARNING
        named = [finding for finding in self.findings if finding.severity is not Severity.INFO]
        if wanted is Severity.INFO:
            return self.findings[0] if self.findings and not named else None
        return named[0] if named else None

    @property
    def gained_ms(self) -> float:
        return self.step_ms - self.clean_ms

    @property
    def stated_ms(self) -> float | None:
        if self.first is None:
            return None
        ns = self.half_size_ns if self.case.cause == "structural" else self.first.gain_ns
        return None if ns is None else ns / 1e6

    @property
    def is_named(self) -> bool:
        if self.first is None:
            return False
        evidence, case = self.first.evidence, self.case
        is_there = all(evidence["where"].get(place) == at for place, at in case.where.items())
        return evidence.get("cause") == case.cause and is_there and evidence.get("reason") == case.reason

    @property
    def error(self) -> float | None:
        return None if self.stated_ms is None else self.stated_ms / self.gained_ms - 1


def run(folder: Path, setting: Setting, fault: Fault | None = None) -> Path:
    """Run a setting, if its folder is not there yet."""
    if folder.exists():
        return folder
    steps = setting.steps + _WARMUP_STEPS
    world, faulty = str(setting.pp * setting.dp), () if fault is None else ("--fault", str(fault))
    profiled = ("--steps", f"{_WARMUP_STEPS}:{steps}", "--no-analyze", "-o", folder)
    ended = pptrace(
        "run", "-n", world, *profiled, SCRIPT, *faulty, "--steps", str(steps), *setting.arguments, forked=True
    )
    if ended.code:
        raise RuntimeError(f"{folder.name}: {ended.err}")
    return folder


def gain_of_half_size_ns(run: Run) -> int:
    """Gain that whatif promises of twice as many microbatches, for the work of a step, ns."""
    number = run.report.schedule.num_microbatches
    assert number is not None
    table = run.whatif(microbatches=2 * number).scenarios
    return int(table[table["name"] == f"{2 * number} microbatches"]["gain_ns"].iloc[0]) // 2


def _spans_ms(report: Report) -> list[float]:
    return [step.span_ns / 1e6 for step in report.steps if step.span_ns is not None]


def outcome_of(case: Case, folder: Path) -> Outcome:
    """Run a case and its clean run."""
    clean = case.clean or case.setting
    faulty = load(run(folder / case.name.replace(" ", "-"), case.setting, case.fault))
    faulty_report, half_size_ns = faulty.report, gain_of_half_size_ns(faulty) if case.cause == "structural" else None
    clean_report = load(run(folder / f"clean-{clean.name}", clean)).report
    faulty_ms, clean_ms = _spans_ms(faulty_report), _spans_ms(clean_report)
    if case.fault is None or case.fault.chance == 1:
        return Outcome(case, faulty_report.findings, min(faulty_ms), min(clean_ms), half_size_ns)
    return Outcome(case, faulty_report.findings, float(np.mean(faulty_ms)), float(np.median(clean_ms)))


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The lines of the table."""
    yield "| fault | `--fault` | first finding | names it | gain stated, ms | gained, ms | error |"
    yield "|---|---|---|---|---:|---:|---:|"
    for outcome in outcomes:
        first = outcome.first.title if outcome.first else "none"
        stated = "" if outcome.stated_ms is None else f"{outcome.stated_ms:.1f}"
        error = "" if outcome.error is None else f"{outcome.error:+.1%}"
        named = "yes" if outcome.is_named else "no"
        option = "" if outcome.case.fault is None else f"`{outcome.case.fault}`"
        yield f"| {outcome.case.name} | {option} | {first} | {named} | {stated} | {outcome.gained_ms:.1f} | {error} |"


_HEALTHY_SETTINGS = (
    Setting(forward_ms=10, steps=8),
    Setting(pp=2, microbatches=4, forward_ms=15, steps=8),
    Setting(pp=2, dp=2, microbatches=4, forward_ms=15, steps=8),
    Setting(schedule="gpipe", microbatches=4, forward_ms=15, steps=8),
    Setting(schedule="interleaved-1f1b", pp=2, microbatches=4, forward_ms=15, steps=8),
    Setting(schedule="zb-h1", pp=4, microbatches=4, forward_ms=15, steps=8),
    Setting(schedule="zbv", pp=2, microbatches=4, forward_ms=15, steps=8),
    _BALANCED,
)


def healthy_findings(number: int, folder: Path) -> tuple[Setting, list[Finding]]:
    """The findings of one healthy run but for those that are information: structural ones, and single long steps."""
    setting = _HEALTHY_SETTINGS[number % len(_HEALTHY_SETTINGS)]
    report = load(run(folder / f"healthy-{number}-{setting.name}", setting)).report
    return setting, [finding for finding in report.findings if finding.severity is not Severity.INFO]


def healthy_table(runs: Sequence[tuple[Setting, Sequence[Finding]]]) -> Iterator[str]:
    """The lines of the table of healthy runs, by what ran."""
    yield "| healthy runs | number | with a finding | findings |"
    yield "|---|---:|---:|---|"
    for setting in dict.fromkeys(setting for setting, _ in runs):
        of_setting = [findings for each, findings in runs if each == setting]
        titles = "; ".join(finding.title for findings in of_setting for finding in findings)
        experts = ", experts" if setting.routes else ""
        name = f"{setting.schedule}, pp {setting.pp}, dp {setting.dp}, {setting.microbatches} microbatches{experts}"
        yield f"| {name} | {len(of_setting)} | {sum(map(bool, of_setting))} | {titles} |"
    yield f"| all | {len(runs)} | {sum(bool(findings) for _, findings in runs)} | |"


_BEGIN, _END = "<!-- faults: made by tools/faults.py -->", "<!-- end of faults -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="of the faults, may be given again")
    parser.add_argument(
        "--healthy", type=int, default=0, metavar="N", help="also run so many healthy runs; 0: faults alone"
    )
    parser.add_argument("--no-faults", action="store_true", help="healthy runs alone")
    parser.add_argument("--folder", type=Path, help="where runs are kept, and taken from where they are there")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="write the tables there")
    options = parser.parse_args()
    marked = MarkedTable(options.write, _BEGIN, _END)
    marked.require_markers()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        cases = [case for case in CASES if not options.only or case.name in options.only]
        outcomes = []
        for case in () if options.no_faults else cases:
            began = time.monotonic()
            outcomes.append(outcome_of(case, folder))
            print(f"{case.name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        healthy = [healthy_findings(number, folder) for number in range(options.healthy)]
    text = "\n".join([*(table(outcomes) if outcomes else ()), "", *(healthy_table(healthy) if healthy else ())])
    marked.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
