"""Locate the ranks of runs in which some have operators and messages that no label names: matched jointly, then located."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pptrace.model.tables import COMPUTE_KINDS, What
from pptrace.recognise.infer.locate import Located, groups_of, locate
from pptrace.recognise.infer.match_checks import contradiction_of_chunks
from pptrace.recognise.infer.match_ranks import JointMatch, alone_with_messages, is_unsure_alone, match_ranks
from pptrace.recognise.infer.stages import StageAssignment
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.slices import rows_among


def locate_unlabelled(ranks: Sequence[RecognisedRank], num_ranks: int | None, spanned: Sequence[int]) -> Located:
    """Match ranks without labels jointly and locate all; once more without what order alone inferred, where that is refuted.

    Args:
        num_ranks: the ranks that the run had, when known.
        spanned: the ranks of OpenTelemetry spans.
    """
    ranks = tuple(ranks)
    groups = groups_of(ranks)
    joint = match_ranks(ranks, groups[1], num_ranks)
    groups = groups if joint.ranks is ranks else groups_of(joint.ranks)
    located = locate(joint.ranks, groups, joint.pipelines, num_ranks, spanned)
    unproved, against = _unproved(ranks, joint, located.placed)
    if unproved:
        no_pipeline = [
            recognised.number
            for recognised in ranks
            if recognised.number in unproved & joint.refused
            and recognised.host["what"].isin((What.OPERATOR.value, What.ENGINE.value)).any()
        ]
        proved = [rank.without_inferred() if rank.number in unproved else rank for rank in ranks]
        located = locate(proved, groups_of(proved, no_pipeline), joint.pipelines, num_ranks, spanned)
    lines = joint.notes if not joint.refused or (located.placed.mesh.vpp or 1) == 1 else ()
    lines += alone_with_messages(located.ranks) if not joint.notes else ()
    lines += (f"several stages per rank are ruled out as well: {against}",) if against else ()
    return replace(located, warnings=(*lines, *located.warnings))


def _unproved(
    ranks: Sequence[RecognisedRank], joint: JointMatch, placed: StageAssignment
) -> tuple[frozenset[int], str]:
    """The ranks of which order alone inferred ops that may be none, and what speaks against several stages on each."""
    has_chunks = (placed.mesh.vpp or 1) > 1
    refused = [recognised for recognised in ranks if recognised.number in joint.refused]
    against = contradiction_of_chunks(refused, placed.ops, placed.mesh) if has_chunks and refused else ""
    inferred = placed.ops[(placed.ops["source"] == "inferred") & rows_among(placed.ops["kind"], COMPUTE_KINDS)]
    # More backwards than forwards may include separate weight gradients.
    is_split = (inferred["stage"] < 0).all() and (inferred["kind"] == "B").sum() > (inferred["kind"] == "F").sum()
    if refused and (against or not (has_chunks or is_split)):
        return joint.refused, against
    if not any(recognised.is_paired for recognised in joint.ranks) and is_unsure_alone(ranks, placed.ops):
        return frozenset(recognised.number for recognised in ranks), ""
    return frozenset(), ""
