"""Receives that were posted before their sender could send, and the calls and ops that they held up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd


def applies(comms: pd.DataFrame, _facts: Mapping[int, Mapping[str, Any]]) -> bool:
    """Return whether ranks of a pipeline receive from each other."""
    return bool(((comms["axis"] == "pp") & (comms["kind"] == "recv")).any())
