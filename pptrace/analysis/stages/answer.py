"""Compute of the stages by kind of work and part of the model, and why one stage takes longer than another, as sums to 0 ns.

Stages take longer for more that they do, or for the same: then their rank is slow, where there is one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from pptrace.analysis.aligned import AlignedRun, StepsOfRank
from pptrace.analysis.part_words import SLOW_RANK_ALIKE, WORDS
from pptrace.analysis.result import Finding
from pptrace.analysis.stages.flops import (
    MULTIPLYING,
    NOT_PREDICTED,
    OPERATORS,
    SIZES,
    OpSums,
    StageFlops,
    flop_sums,
    predicted_by_run,
    why_unknown,
    with_sizes,
)
from pptrace.analysis.stages.layer_order import parts_by_order
from pptrace.analysis.stages.types import StageCompute, StageDifference, StageOps, StagePart, StageWork
from pptrace.analysis.stragglers.alike import SLOW_RANK
from pptrace.intervals import intersect, length, lengths_within
from pptrace.marks import PART
from pptrace.model.device import CLASSES, Pieces, WorkClass
from pptrace.model.predicted import gpt_of_run
from pptrace.model.tables import Int64
from pptrace.slices import Slice

if TYPE_CHECKING:
    from pptrace.analysis.questions import QuestionInputs


_LEAST_RATIO = 1.1
_SAME_NUMBER = 0.02
"""Part of a number of kernels by which two stages may differ and still run as many."""
_LEAST_EXPLAINED = 0.8
_LAYERS = "layers"
"""The part of a stage of our model that its layers are."""


def same_work(
    differences: Sequence[StageDifference], ops: Mapping[tuple[int, str], OpSums], layers: Sequence[int] | None
) -> dict[str, Any] | None:
    """Text of a finding about a stage that does the same as another, and takes longer; None where it does more, or may.

    Args:
        differences: those of the stage, the largest first.
        ops: sums of (stage, kind).
        layers: the number of layers of each stage, all alike; None where they are not known, or not alike.

    Returns:
        ``same_work_as`` (the other stage, of several the median), ``same_work_ratio`` (how many times as long it takes) and
        ``same_work`` in words.
    """
    stage, kinds = differences[0].stage, [one.kind for one in differences]
    others = [other for other in {key[0] for key in ops} - {stage} if all((other, kind) in ops for kind in kinds)]
    if layers is None:
        same = [other for other in others if all(_run_as_many(ops[stage, kind], ops[other, kind]) for kind in kinds)]
        of = "kernels or operators of each kind of work"
    else:
        # Layers are what takes longer, not the embedding or the head, which are at an end.
        is_of_layers = 0 < stage < len(layers) - 1 or all(
            sum(part.ns for part in one.parts if part.name == _LAYERS) >= _LEAST_EXPLAINED * one.more_ns
            for one in differences
        )
        same = [other for other in others if is_of_layers and layers[stage] <= layers[other]]
        of = f"layers ({layers[stage]})"
    if not same:
        return None
    lengths = {at: sum(ops[at, kind].compute / ops[at, kind].count for kind in kinds) for at in (stage, *same)}
    than = sorted(same, key=lambda other: (lengths[other], other))[(len(same) - 1) // 2]
    ratio = lengths[stage] / lengths[than]
    if ratio < _LEAST_RATIO:
        return None
    words = f"it takes {ratio:.2f} times as long as stage {than} for as many {of}"
    return {"same_work_as": than, "same_work_ratio": round(ratio, 3), "same_work": words}


def _run_as_many(stage: OpSums, than: OpSums) -> bool:
    """Return whether ops of two stages run as many pieces of each class."""
    names = stage.pieces.keys() | than.pieces.keys()
    pairs = [tuple(of.pieces.get(name, 0) / of.count for of in (stage, than)) for name in names]
    return bool(pairs) and all(abs(a - b) <= _SAME_NUMBER * max(a, b) for a, b in pairs)


_LEAST_MORE = 0.02
"""Part of an op by which a stage has to take longer than another for the difference to be reported."""
_MOST_PARTS = 40
"""Most parts of the model in a report; the smallest of more are summed."""
OTHERS = "others"


Sums = dict[tuple[int, str], OpSums]


def of_rank(rank: int, steps: StepsOfRank, data: AlignedRun) -> Sums | None:
    """The sums of the ops of a rank by (stage, kind), of those steps in which it is known when it computed; None without any."""
    ops, work = data.rows.of_rank(rank).ops, data.work.get(rank)
    if work is None or work.missing_device_events or not len(work.pieces) or not len(ops):
        return None
    known = sorted({*steps.reported} - data.lost_steps.get(rank, frozenset()))
    ops = ops.where(np.isin(ops["step"], known) & (ops["stage"] >= 0))
    pieces, computes = _on_common_clock(rank, work.pieces, data), data.lanes[rank].compute
    return {
        (stage, str(kind)): _sums(rows, pieces, computes)
        for stage, of_stage in ops.by("stage").items()
        for kind, rows in of_stage.by("kind").items()
    }


def work_of_op(rank: int, start_ns: int, end_ns: int, data: AlignedRun) -> StageOps | None:
    """The work of one op of a rank, from its times on the common clock; None where the rank's trace does not tell."""
    work = data.work.get(rank)
    if work is None or work.missing_device_events or not len(work.pieces):
        return None
    first, beyond = data.clock.times_on_rank_clock(rank, np.array([start_ns, end_ns])).tolist()
    low, high = np.searchsorted(work.pieces.end_ns, first), np.searchsorted(work.pieces.start_ns, beyond, side="right")
    columns = ("start_ns", "end_ns", "work", "part", "name", "flops")
    pieces = replace(work.pieces, **{name: getattr(work.pieces, name)[low:high] for name in columns})
    op = Slice({"start_ns": np.array([start_ns]), "end_ns": np.array([end_ns])})
    return _ops(-1, "", _sums(op, _on_common_clock(rank, pieces, data), data.lanes[rank].compute), None)


def _on_common_clock(rank: int, pieces: Pieces, data: AlignedRun) -> Pieces:
    start, end = (data.clock.to_common_clock(rank, times) for times in (pieces.start_ns, pieces.end_ns))
    return replace(pieces, start_ns=start, end_ns=end)


def _sums(ops: Slice, pieces: Pieces, computes: Int64) -> OpSums:
    """The sums of some ops, by the pieces in their compute; what of it is in no piece is outside of all operators."""
    order = np.argsort(ops["start_ns"], kind="stable")
    start, end = ops["start_ns"][order], ops["end_ns"][order]
    total = int(lengths_within(computes, start, end).sum())
    op = np.searchsorted(start, pieces.end_ns - 1, side="right") - 1  # the op that a piece ends in
    inside = np.flatnonzero((op >= 0) & (pieces.start_ns < end[op]))
    first, last = (
        np.maximum(pieces.start_ns[inside], start[op[inside]]),
        np.minimum(pieces.end_ns[inside], end[op[inside]]),
    )
    times = np.stack((first, last), axis=1)
    work, part = pieces.work[inside], pieces.part[inside]
    of_classes, counts = Counter[str](), Counter[str]()
    for code in np.unique(work).tolist():
        of_classes[str(CLASSES[code])] = length(intersect(times[work == code], computes))
        counts[str(CLASSES[code])] = int((work == code).sum())
    if outside := total - sum(of_classes.values()):
        of_classes[str(WorkClass.PYTHON)] += outside
    names: Sequence[str] = pieces.names
    if not _tells_parts(op[inside], part, names):
        part, names = parts_by_order(op[inside], pieces.name[inside]) or (np.zeros(0, dtype=np.int32), ())
    parts = Counter[str]()
    if len(names):
        for code in np.unique(part[part > 0]).tolist():
            parts[names[code].removeprefix(PART)] = length(intersect(times[part == code], computes))
        parts[""] = total - sum(parts.values())
    flops, lengths = pieces.flops[inside], last - first
    sums = OpSums(len(start), total, of_classes, parts, counts, flop_sums(flops, lengths, work, CLASSES))
    if not (pieces.work != CLASSES.index(WorkClass.PYTHON)).any():  # no operators were recorded
        sums.class_flops.unknown.update(of_classes)
    elif len(names):
        sums.part_flops = flop_sums(flops, lengths, part, [name.removeprefix(PART) for name in names])
    return sums


def _tells_parts(op: npt.NDArray[np.intp], part: npt.NDArray[np.int32], names: Sequence[str]) -> bool:
    """Return whether ops have several parts, or the program says what its parts are; else a name that all of an op has is its."""
    if not (part > 0).any():
        return False
    if any(name.startswith(PART) for name in names):
        return True
    pairs = np.unique(np.stack((op, part)), axis=1)
    _, num_parts = np.unique(pairs[0], return_counts=True)
    return bool((num_parts > 1).any())


def sums_of_run(of_ranks: Iterable[Sums]) -> Sums:
    """The sums of all ranks together."""
    totals: Sums = {}
    for sums in of_ranks:
        for key, part in sums.items():
            total = totals.setdefault(key, OpSums())
            total.count += part.count
            total.compute += part.compute
            total.class_flops.update(part.class_flops)
            total.part_flops.update(part.part_flops)
            for name in ("classes", "parts", "pieces"):
                getattr(total, name).update(getattr(part, name))
            if total.parts and not part.parts:
                total.parts[""] += part.compute  # of a replica whose trace names none
    return totals


def stage_compute(totals: Sums, predicted: StageFlops = NOT_PREDICTED) -> StageCompute | None:
    """The compute of all stages; None where no rank's trace tells what its ops did.

    ``predicted`` are the FLOPs of an op by its stage and kind, as the run itself wrote them down.
    """
    if not totals:
        return None
    ops = tuple(_ops(*key, sums, predicted.get(key)) for key, sums in sorted(totals.items()))
    return StageCompute(ops, tuple(_differences(totals)))


def _ops(stage: int, kind: str, sums: OpSums, predicted: Mapping[str, int] | None) -> StageOps:
    """The work of the ops of a stage and kind, with FLOPs by their operators, else by the sizes of the model."""
    why, source, flops = why_unknown(sums.class_flops, sums.compute), OPERATORS, sums.class_flops
    if why and predicted:
        why, source, flops = "", SIZES, with_sizes(sums.classes, sums.count, predicted)
    classes = tuple(
        StageWork(part.name, part.ns, flops.of(part.name) if part.name in MULTIPLYING else None)
        for part in _largest_first(sums.classes)
    )
    parts = _largest_first(sums.parts)
    if len(parts) > _MOST_PARTS:
        rest = sum(part.ns for part in parts[_MOST_PARTS - 1 :])
        parts = (*parts[: _MOST_PARTS - 1], StagePart(OTHERS, rest))
    of_parts = tuple(
        StageWork(
            part.name, part.ns, sums.part_flops.of(part.name) if sums.part_flops.flops and part.name != OTHERS else None
        )
        for part in parts
    )
    total = None if why else flops.flops.total()
    return StageOps(stage, kind, sums.count, sums.compute, classes, of_parts, total, "" if why else source, why)


def _largest_first(entries: Mapping[str, int]) -> tuple[StagePart, ...]:
    return tuple(
        StagePart(name, ns) for name, ns in sorted(entries.items(), key=lambda entry: (-entry[1], entry[0])) if ns
    )


def _differences(totals: Sums) -> Iterator[StageDifference]:
    """The stages of each kind that take longer than the one with the lower median of the means."""
    for kind in sorted({kind for _, kind in totals}):
        stages = [stage for stage, of_kind in sorted(totals) if of_kind == kind]
        means = {stage: _means(totals[stage, kind].classes, totals[stage, kind].count) for stage in stages}
        lengths = {stage: sum(means[stage].values()) for stage in stages}
        than = sorted(stages, key=lambda stage: (lengths[stage], stage))[(len(stages) - 1) // 2]
        for stage in stages:
            more = lengths[stage] - lengths[than]
            if more > _LEAST_MORE * lengths[than]:
                names = means[stage].keys() | means[than].keys()
                classes = {name: means[stage].get(name, 0) - means[than].get(name, 0) for name in names}
                parts = _more_by_part(totals[stage, kind], totals[than, kind])
                yield StageDifference(kind, stage, than, more, _by_size(classes), _by_size(parts))


def _means(entries: Mapping[str, int], count: int) -> dict[str, int]:
    """Entries of the mean op, ns: rounded so that they sum to the mean of their sum."""
    names = sorted(entries)
    bounds = np.cumsum([0, *(entries[name] for name in names)]) // count
    return dict(zip(names, np.diff(bounds).tolist(), strict=True))


_NUMBER = re.compile(r"[ _.:]*\d+$")
"""Number behind the name of one of several modules that are alike."""


def _more_by_part(stage: OpSums, than: OpSums) -> dict[str, int]:
    """The difference of the mean ops of two stages by part, those that are alike together; {} where one of them has no parts."""
    if not stage.parts or not than.parts:
        return {}
    more: dict[str, int] = {}
    for sums, sign in ((stage, 1), (than, -1)):
        for name, ns in _means(sums.parts, sums.count).items():
            alike = _NUMBER.sub("", name)
            more[alike] = more.get(alike, 0) + sign * ns
    return more


def _by_size(entries: Mapping[str, int]) -> tuple[StagePart, ...]:
    """The entries that are not 0, the largest first, be it more or less."""
    return tuple(sorted(_largest_first(entries), key=lambda part: -abs(part.ns)))


def answer(inputs: QuestionInputs) -> Mapping[str, Any]:
    """The work of the stages; the finding of a heavy stage says of which kinds of work it has more, or that it has no more."""
    totals = sums_of_run(inputs.of_ranks.values())
    compute = stage_compute(totals, predicted_by_run(inputs.run.facts.values()))
    if compute is None:
        return {}
    sizes = gpt_of_run(inputs.run.facts.values(), inputs.run.schedule)
    layers = None if sizes is None or inputs.experts is not None else sizes.layers_per_stage
    if layers is not None and any(stage >= len(layers) for stage, _ in totals):
        layers = None  # two chains of stages, which stand for the same layers
    known = tuple(one for one in inputs.report.missing_evidence if one.findings != ("straggler",))
    of_stages: dict[int, list[StageDifference]] = {}
    for one in sorted(compute.differences, key=lambda one: -one.more_ns):
        of_stages.setdefault(one.stage, []).append(one)
    has_slow_rank = any(one.evidence.get("reason") == SLOW_RANK for one in inputs.report.findings)
    is_one_pipeline = has_slow_rank or len(known) < len(inputs.report.missing_evidence)
    same = {
        stage: found
        for stage, more in of_stages.items()
        if is_one_pipeline and (found := same_work(more, totals, layers)) is not None
    }
    findings = tuple(_with_reason(one, of_stages, same) for one in inputs.report.findings)
    tells_them_apart = any({"same_work", "same_work_stages"} & one.evidence.keys() for one in findings)
    return {"stages": compute, "findings": findings, **({"missing_evidence": known} if tells_them_apart else {})}


def _with_reason(
    finding: Finding, of_stages: Mapping[int, Sequence[StageDifference]], same: Mapping[int, Mapping[str, Any]]
) -> Finding:
    """A finding about unequal stages with what the heaviest has more of, or with those that take longer for the ``same`` work."""
    stage = (finding.evidence.get("where") or {}).get("stage")
    if finding.evidence.get("cause") != "imbalance" or (stage is None and not same):
        return finding
    detail, evidence = finding.detail, finding.evidence
    if stage is None:
        texts = "; ".join(f"stage {slow}: {found['same_work']}" for slow, found in sorted(same.items()))
        detail = f"{detail}. {texts[:1].upper()}{texts[1:]}: its rank may be slow"
        return replace(finding, detail=detail, evidence={**evidence, "same_work_stages": sorted(same)})
    if stage not in of_stages:
        return finding
    if stage in same and detail.endswith(SLOW_RANK_ALIKE):
        evidence = {**evidence, **same[stage]}
        detail = detail.removesuffix(f"{WORDS['imbalance'].look}{SLOW_RANK_ALIKE}")
        detail += same[stage]["same_work"]
        detail += ": its rank is slow, or what it computes is larger; look at that before layers are moved"
    text = "; ".join(map(words_of, of_stages[stage][:_MOST_NAMED]))
    return replace(finding, detail=f"{text}. {detail[:1].upper()}{detail[1:]}", evidence=evidence)


_MOST_NAMED = 2
"""Most kinds of ops whose difference a finding tells."""
_MOST_CLASSES = 3
"""Most kinds of work by which a sentence tells a difference."""


def words_of(one: StageDifference) -> str:
    """A difference in words: the largest of its parts, and what the others have together."""
    entries = one.parts if any(part.name for part in one.parts) else one.classes
    shown = entries[:_MOST_CLASSES]
    parts = [f"{part.name or 'what is of no part'} {_signed(part.ns)}" for part in shown if part.ns]
    rest = one.more_ns - sum(part.ns for part in shown)
    parts += [f"all else {_signed(rest)}"] if rest else []
    return (
        f"its {one.kind} takes {_signed(one.more_ns)[1:]} ms more than that of stage {one.than}: {', '.join(parts)} ms"
    )


def _signed(ns: int) -> str:
    """Milliseconds with a sign, to about three digits; the last nanosecond of what is below a tenth of a microsecond."""
    ms = abs(ns) / 1e6
    digits = 0 if ms >= 100 else 1 if ms >= 10 else 2 if ms >= 0.1 else 3 if ms >= 0.01 else 4 if ms >= 0.0001 else 6
    return f"{'-' if ns < 0 else '+'}{ms:,.{digits}f}"
