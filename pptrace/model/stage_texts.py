"""Ops as text while the stages of their rank are unknown: by the rank's chunk.

A label may name a chunk of its rank and no stage; the stage follows when the ranks are joined and their places in the pipeline
are known. Until then the column ``stage`` of OPS and COMMS is :data:`UNKNOWN`, the column ``chunk`` says which of its rank's
stages it is (:data:`UNKNOWN` where the rank may have one alone), and its text begins with a question mark::

    op = ( stage | "?" chunk ) kind [ microbatch ]
"""

from __future__ import annotations

import re
from collections.abc import Callable

from pptrace.model.tables import UNKNOWN

_CHUNK = re.compile(r"\?(\d+)", re.ASCII)


def stage_text(stage: int | None, chunk: int) -> str:
    """The beginning of an op's text."""
    return f"?{max(chunk, 0)}" if stage is None or stage == UNKNOWN else str(stage)


def with_stage_of_chunk(text: str, stage_of: Callable[[int], int]) -> str:
    """The text of an op or an overlapped pair with stages in place of chunks."""
    return _CHUNK.sub(lambda match: str(stage_of(int(match[1]))), text)


def chunks_in(text: str) -> tuple[int, ...]:
    """The chunks that the halves of an overlapped pair name in place of stages."""
    return tuple(map(int, _CHUNK.findall(text)))
