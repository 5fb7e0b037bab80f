"""Columns of times in any unit → int64 nanoseconds, exactly.

Text is read digit by digit. Integers are multiplied. Binary floats, as Parquet files hold them, are split into whole units
and a fraction, so that the result is the nearest nanosecond of the number that the float is.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN, Context, Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.ingest.common.exact_numbers import LIMIT_NS
from pptrace.model.tables import Int64

UNITS = {"ns": 0, "us": 3, "ms": 6, "s": 9}
"""The power of ten that turns a unit into nanoseconds."""
_WIDE = Context(prec=80)


def to_ns(column: pd.Series[Any], unit: str) -> tuple[Int64, npt.NDArray[np.bool_]]:
    """(nanoseconds, good): shape (n,) each; where a value is no time that int64 holds, ``good`` is False and the time 0."""
    power = UNITS[unit]
    if pd.api.types.is_integer_dtype(column.dtype) and not column.isna().any():
        return _scaled(column.to_numpy(), power)
    if pd.api.types.is_float_dtype(column.dtype):
        return _from_floats(column.to_numpy(dtype=np.float64, na_value=np.nan), power)
    return _from_texts([str(value) for value in column.tolist()], power)


def _scaled(values: npt.NDArray[Any], power: int) -> tuple[Int64, npt.NDArray[np.bool_]]:
    limit = LIMIT_NS // 10**power
    good = (values <= limit) & (values >= -limit) if values.dtype.kind == "i" else values <= limit
    return np.where(good, values, 0).astype(np.int64) * 10**power, good


def _from_floats(values: npt.NDArray[np.float64], power: int) -> tuple[Int64, npt.NDArray[np.bool_]]:
    good = np.isfinite(values) & (np.abs(values) <= LIMIT_NS / 10**power)
    fraction, whole = np.modf(np.where(good, values, 0.0))
    return whole.astype(np.int64) * 10**power + np.rint(fraction * 10**power).astype(np.int64), good


def _from_texts(texts: Sequence[str], power: int) -> tuple[Int64, npt.NDArray[np.bool_]]:
    times = [_from_text(text, power) for text in texts]
    return (
        np.array([0 if time is None else time for time in times], dtype=np.int64),
        np.array([time is not None for time in times], dtype=np.bool_),
    )


def _from_text(text: str, power: int) -> int | None:
    try:
        value = Decimal(text.strip())
        if not value.is_finite() or _WIDE.abs(value) > LIMIT_NS // 10**power:
            return None
    except ArithmeticError:  # no number, or one beyond Decimal's own exponents
        return None
    return int(value.scaleb(power, _WIDE).to_integral_value(ROUND_HALF_EVEN, _WIDE))
