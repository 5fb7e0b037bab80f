"""Predict B from a trace of A, then really run B: ``predictions.py [--write FILE.md] [--folder DIR]``.

Every run is the training example on processes of this machine that talk by gloo. With ops that sleep, two cores keep time for
four ranks, and what they compute besides is the same for all; with ops that compute, the ranks share the cores. A pair is two
runs of as many ranks; what is predicted is the typical step of B, by ``pptrace whatif`` from A.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from msgspec import structs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pptrace.analysis.whatif.result import Scenario
from pptrace.api.whatif import predict_changes
from pptrace.api.wishes import Wishes
from pptrace.schedule.registry import get
from pptrace.workflow.analyse import Analysis
from pptrace.workflow.load import load
from tests.support.programs import ROOT, pptrace

SCRIPT = ROOT / "instrument" / "examples" / "train_gpt.py"
_WARMUP_STEPS = 2
_STEPS = 12
_LAYER_MS = 10.0
"""Time that the F of a layer of these sleeps: four layers as long as a stage of the other runs."""
_REPEATS = 3
"""Runs of each setting whose ops compute, and of each uneven split and of the one that is advised for it, by turns."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A run: its schedule, with ops of a stage that sleep ``forward_ms`` and twice as much, or compute where that is 0.

    With a ``split``, every layer sleeps ``forward_ms`` and twice as much.
    """

    pp: int
    schedule: str
    microbatches: int
    forward_ms: float
    chunks: int | None = None
    split: tuple[int, ...] = ()
    recompute: int | None = None
    """Layers of each stage that recompute fully; None: of a run without that choice."""

    @property
    def num_chunks(self) -> int:
        return self.chunks or get(self.schedule).default_chunks

    @property
    def arguments(self) -> tuple[str, ...]:
        sizes = ("--pp", str(self.pp), "--microbatches", str(self.microbatches), "--schedule", self.schedule)
        chunked = () if self.chunks is None else ("--chunks", str(self.chunks))
        split = ("--split", commas(self.split), "--sleep-per-layer") if self.split else ()
        ops = self._sleeping if self.forward_ms else self._computing
        block = ("--recompute", "full", "--recompute-method", "block", "--recompute-num-layers", str(self.recompute))
        return (*sizes, *chunked, *ops, *split, *(block if self.recompute else ()), "--microbatch-size", "1")

    @property
    def _sleeping(self) -> tuple[str, ...]:
        forward = self.forward_ms / (1 if self.split else self.num_chunks)
        model = ("--hidden", "8", "--heads", "2", "--seq", "4", "--layers", str(sum(self.split) or 4 * self.pp))
        return (*model, "--sleep-forward", str(forward), "--sleep-backward", str(2 * forward))

    @property
    def _computing(self) -> tuple[str, ...]:
        return ("--hidden", "256", "--heads", "4", "--seq", "128", "--layers", str(4 * self.pp))

    @property
    def name(self) -> str:
        kind = "sleeping" if self.forward_ms else "computing"
        split = "-".join(map(str, ("-split", *self.split))) if self.split else ""
        again = "" if self.recompute is None else f"-recompute{self.recompute}"
        return f"{kind}-pp{self.pp}-{self.schedule}-v{self.num_chunks}-m{self.microbatches}{split}{again}"

    @property
    def words(self) -> str:
        chunks = f", {self.num_chunks} chunks" if get(self.schedule).takes_any_chunks else ""
        split = f", layers {commas(self.split)}" if self.split else ""
        again = "" if self.recompute is None else f", {self.recompute} of 4 layers recompute"
        return f"{self.schedule}{chunks}, {self.microbatches} microbatches{split}{again}"


def commas(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


@dataclass(frozen=True, slots=True)
class Pair:
    """A prediction of the typical step of ``target`` from a run of ``source``, and the step as it was then measured, ns."""

    source: Setting
    target: Setting
    scenario: Scenario | None
    replay_error: float
    real_ns: int
    before_ns: int | None = None
    """The typical step of ``source``."""

    @property
    def error(self) -> float | None:
        return None if self.scenario is None else self.scenario.span_ns / self.real_ns - 1

    @property
    def holds(self) -> bool:
        return self.scenario is not None and self.scenario.low_ns <= self.real_ns <= self.scenario.high_ns


def settings_of(pp: int, forward_ms: float) -> list[Setting]:
    """Runs that are predicted from one another."""
    names = ("gpipe", "1f1b", "zb-h1", "zbv", "interleaved-1f1b")
    return [*(Setting(pp, name, 2 * pp, forward_ms) for name in names), Setting(pp, "1f1b", 4 * pp, forward_ms)]


def run(folder: Path, setting: Setting) -> Path:
    """Run a setting, if its folder is not there yet."""
    where = folder / setting.name
    if not where.exists():
        steps = _WARMUP_STEPS + _STEPS
        profiled = ("--steps", f"{_WARMUP_STEPS}:{steps}", "--no-analyze", "-o", where)
        began = time.monotonic()
        ended = pptrace(
            "run", "-n", str(setting.pp), *profiled, SCRIPT, "--steps", str(steps), *setting.arguments, forked=True
        )
        if ended.code:
            raise RuntimeError(f"{setting.name}: {ended.err}")
        print(f"{setting.name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    return where


def pairs_of(settings: Sequence[Setting], folder: Path, repeats: int = 1) -> Iterator[Pair]:
    """All ordered pairs of runs, each the median one of so many, which run by turns."""
    folders = [folder / f"repeat-{number}" for number in range(repeats)] if repeats > 1 else [folder]
    for where in folders:
        where.mkdir(exist_ok=True)
        for setting in settings:
            run(where, setting)
    analyses = {setting: _median([load([run(where, setting)]) for where in folders]) for setting in settings}
    for source in settings:
        for target in settings:
            if source != target:
                yield _pair(source, target, analyses)


def _median(analyses: Sequence[Analysis]) -> Analysis:
    """The one whose typical step is the median of all."""

    def span(analysis: Analysis) -> int:
        step = analysis.report.typical_step
        assert step is not None
        assert step.span_ns is not None
        return step.span_ns

    return sorted(analyses, key=span)[len(analyses) // 2]


def _pair(source: Setting, target: Setting, analyses: dict[Setting, Analysis]) -> Pair:
    same = source.microbatches == target.microbatches
    wishes = Wishes(schedules=(target.schedule,), microbatches=None if same else target.microbatches)
    wishes = replace(wishes, chunks=target.num_chunks if get(target.schedule).takes_any_chunks else None)
    if source.recompute != target.recompute:
        wishes = replace(wishes, recompute_layers=target.recompute)
    result = predict_changes(analyses[source], wishes).result
    step = analyses[target].report.typical_step
    assert step is not None
    assert step.span_ns is not None
    scenario = result.scenarios[0] if result.scenarios else None
    return Pair(source, target, scenario, result.replay_error, step.span_ns)


RECOMPUTING = [Setting(2, "1f1b", 4, 0.0, recompute=layers) for layers in (0, 2, 4)]
RECOMPUTING += [Setting(2, "zb-h1", 4, 0.0, recompute=layers) for layers in (0, 4)]
"""Runs that compute, of which some or all layers recompute."""
UNEVEN = [
    Setting(4, "1f1b", 8, _LAYER_MS, split=(7, 3, 3, 3)),
    Setting(4, "1f1b", 8, _LAYER_MS, split=(2, 2, 4, 8)),
    Setting(4, "gpipe", 8, _LAYER_MS, split=(3, 6, 4, 3)),
    Setting(2, "zb-h1", 4, _LAYER_MS, split=(3, 5)),
    Setting(2, "interleaved-1f1b", 4, _LAYER_MS, chunks=2, split=(4, 2, 4, 2)),
]
"""Runs whose layers are divided unevenly."""


def splits_of(settings: Sequence[Setting], folder: Path) -> Iterator[Pair]:
    """From each run to the one with the split that ``pptrace whatif`` advises, whatever it is: the medians of several of both.

    A step of another run of the same program is off by a part of it that is several times as large a part of the gain.
    """
    for setting in settings:
        pairs = []
        target = setting
        for number in range(_REPEATS):
            where = folder / f"repeat-{number}"
            where.mkdir(exist_ok=True)
            analysis = load([run(where, setting)])
            if target is setting:
                changes = predict_changes(analysis, Wishes()).result
                split = next(one.split for one in changes.scenarios if one.name.startswith("split "))
                assert split is not None
                target = replace(setting, split=split)
            result = predict_changes(analysis, Wishes(split=target.split)).result
            step = load([run(where, target)]).report.typical_step
            assert step is not None
            assert step.span_ns is not None
            one = result.scenarios[0]
            pairs.append((one.span_ns, one.gain_ns, step.span_ns, result.measured_span_ns))
        span, gain, real, before = (round(median(values)) for values in zip(*pairs, strict=True))
        usual = structs.replace(one, span_ns=span, gain_ns=gain)
        yield Pair(setting, target, usual, result.replay_error, real, before)


def table_of_gains(pairs: Sequence[Pair]) -> Iterator[str]:
    """The lines of the table of runs with the advised split: what was promised and what it gained."""
    yield "| measured | advised | ms | promised, ms | really, ms | gain promised, ms | really, ms | off |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for pair in pairs:
        assert pair.scenario is not None
        assert pair.before_ns is not None
        promised, gained = pair.scenario.gain_ns / 1e6, (pair.before_ns - pair.real_ns) / 1e6
        spans = [f"{ns / 1e6:.1f}" for ns in (pair.before_ns, pair.scenario.span_ns, pair.real_ns)]
        gains = (f"{promised:.1f}", f"{gained:.1f}", f"{promised / gained - 1:+.1%}")
        yield f"| {' | '.join((pair.source.words, commas(pair.target.split), *spans, *gains))} |"
    yield ""


def table(pairs: Sequence[Pair]) -> Iterator[str]:
    """The lines of the table of pairs, and of what they come to."""
    yield "| ranks | measured | predicted | ms | 90 % interval | really, ms | error | holds |"
    yield "|---:|---|---|---:|---|---:|---:|---|"
    for pair in pairs:
        head = f"| {pair.source.pp} | {pair.source.words} | {pair.target.words}"
        real = f"{pair.real_ns / 1e6:.1f}"
        if pair.scenario is None or pair.error is None:
            yield f"{head} | refused: replay {pair.replay_error:.1%} off | | {real} | | |"
            continue
        low, high = pair.scenario.low_ns / 1e6, pair.scenario.high_ns / 1e6
        span = pair.scenario.span_ns / 1e6
        held = "yes" if pair.holds else "no"
        yield f"{head} | {span:.1f} | {low:.1f} to {high:.1f} | {real} | {pair.error:+.1%} | {held} |"
    yield ""
    yield summary(pairs)


def summary(pairs: Sequence[Pair]) -> str:
    """One sentence about all pairs."""
    errors = [abs(pair.error) for pair in pairs if pair.error is not None]
    if not errors:
        return f"{len(pairs)} pairs, all refused."
    held = sum(pair.holds for pair in pairs)
    refused = len(pairs) - len(errors)
    return (
        f"{len(pairs)} pairs, {refused} refused: median error {median(errors):.1%}, largest {max(errors):.1%}; the interval "
        f"holds in {held} of {len(errors)}."
    )


_PAGE = """\
# Predictions and what then ran

Written by `{command}`: the typical step of one run, predicted from the trace of another by `pptrace whatif`, and
the step that was then really measured. Each run is this project's training example, {steps} steps, on processes of one machine
with two cores that talk by gloo; of runs whose ops compute the median one of {repeats}. How predictions are made, and what
they assume: [What would get it back](whatif.md).

"""


def _sleeping(folder: Path) -> Iterator[str]:
    return table([pair for pp in (2, 4) for pair in pairs_of(settings_of(pp, 40.0), folder)])


def _splits(folder: Path) -> Iterator[str]:
    yield f"A layer's F sleeps {_LAYER_MS:.0f} ms, its B twice as long. Medians of {_REPEATS} runs of either split, in turns."
    yield ""
    yield from table_of_gains(list(splits_of(UNEVEN, folder)))


def _computing(folder: Path) -> Iterator[str]:
    return table(list(pairs_of(settings_of(2, 0.0), folder, _REPEATS)))


def _recomputing(folder: Path) -> Iterator[str]:
    return table(list(pairs_of(RECOMPUTING, folder, _REPEATS)))


SECTIONS: dict[str, Callable[[Path], Iterator[str]]] = {
    "Ops that sleep": _sleeping,
    "The advised split, with layers that sleep": _splits,
    "Ops that compute on shared cores": _computing,
    "Recompute": _recomputing,
}
"""The sections of the page by their titles: the lines of each, from runs that are kept in a folder."""


def sections_of(page: str) -> dict[str, str]:
    """The text of each section of a page by its title."""
    _, *sections = re.split(r"(?m)^## ", page)
    return {title: text.strip() for title, _, text in (section.partition("\n") for section in sections)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where runs are kept, and taken from where they are there")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="write the tables there")
    parser.add_argument("--only", choices=tuple(SECTIONS), action="append", help="keep the other sections of the page")
    options = parser.parse_args()
    text = sections_of(options.write.read_text(encoding="utf-8")) if options.only and options.write else {}
    with tempfile.TemporaryDirectory() as temporary:
        for title in options.only or SECTIONS:
            text[title] = "\n".join(SECTIONS[title](options.folder or Path(temporary)))
            print(f"## {title}\n\n{text[title]}\n")
    if options.write is not None:
        page = _PAGE.format(
            command="python tools/predictions.py --write docs/predictions.md", steps=_STEPS, repeats=_REPEATS
        )
        sections = "\n\n".join(f"## {title}\n\n{text[title].strip()}" for title in SECTIONS if title in text)
        options.write.write_text(f"{page}{sections}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
