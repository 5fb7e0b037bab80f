"""Codes of the ``stage`` column of OPS and COMMS for a stage that is open until the ranks are joined: its rank's chunk.

Chunk 0 is −1, chunk 1 is −2, and so on; −1 is also the stage of what has none. A rank whose stage and chunk are both open
has chunk 0.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

Stage = TypeVar("Stage", int, "pd.Series[int]", npt.NDArray[np.int64])


def open_stage(chunk: Stage) -> Stage:
    """The value of the column for a chunk whose stage is open."""
    return -1 - chunk


def chunk_of_open_stage(stage: Stage) -> Stage:
    """The chunk that a value below 0 of the column stands for."""
    return -1 - stage
