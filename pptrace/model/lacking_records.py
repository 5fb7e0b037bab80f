"""Records that some ranks of a run lack though the others have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pptrace.model.tables import Int64


@dataclass(frozen=True, slots=True)
class LackingRecords:
    """Records that single ranks lack.

    ``messages`` are the steps (−1: of none) of those messages whose other end is not in the trace of the rank;
    ``ranges`` are the ranks without labelled ops.
    """

    messages: Mapping[int, Int64] = field(default_factory=dict)
    ranges: tuple[int, ...] = ()
