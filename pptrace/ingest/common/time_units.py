"""Convert columns of times in any unit to int64 ns, exactly.

Text is converted digit by digit, integers are multiplied. Binary floats, as in Parquet files, are split into an integer part
and a fraction, so that the result is the ns nearest to the float's value.
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
"""Power of ten between a unit and ns."""
_WIDE = Context(prec=80)


def to_ns(column: pd.Series[Any], unit: str) -> tuple[Int64, npt.NDArray[np.bool_]]:
    """Convert a column to (ns, is_valid), shape (n,) each; an invalid value or one beyond int64 becomes 0."""
    power = UNITS[unit]
    if pd.api.types.is_integer_dtype(column.dtype) and not column.isna().any():
        return _scaled(column.to_numpy(), power)
    if pd.api.types.is_float_dtype(column.dtype):
        return _from_floats(column.to_numpy(dtype=np.float64, na_value=np.nan), power)
    return _from_texts([str(value) for value in column.tolist()], power)


def _scaled(values: npt.NDArray[Any], power: int) -> tuple[Int64, npt.NDArray[np.bool_]]:
    limit = LIMIT_NS // 10**power
    is_valid = (values <= limit) & (values >= -limit) if values.dtype.kind == "i" else values <= limit
    return np.where(is_valid, values, 0).astype(np.int64) * 10**power, is_valid


def _from_floats(values: npt.NDArray[np.float64], power: int) -> tuple[Int64, npt.NDArray[np.bool_]]:
    is_valid = np.isfinite(values) & (np.abs(values) <= LIMIT_NS / 10**power)
    fraction, whole = np.modf(np.where(is_valid, values, 0.0))
    return whole.astype(np.int64) * 10**power + np.rint(fraction * 10**power).astype(np.int64), is_valid


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
