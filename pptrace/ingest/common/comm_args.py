"""The table of arguments of communication events, and sizes of elements, bytes, by the framework's name of their dtype."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from pptrace.model.categories import as_category
from pptrace.model.tables import COMM_ARGS, make_table

CommRecord = tuple[int, str, int, int, str, str, str, int, int, int, int, int, str]
"""A row of COMM_ARGS, in the order of the schema."""

_SIZES_BY_BYTES = {
    1: "byte char bool uint8 int8 qint8 quint8 float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz float8_e8m0fnu"
    " float4_e2m1fn_x2 bits8",
    2: "short half bfloat16 int16 uint16 float16 bits16 c10::half c10::bfloat16",
    4: "int float int32 uint32 float32 qint32 complexhalf complex32",
    8: "long double int64 uint64 float64 complexfloat complex64",
    16: "complexdouble complex128",
}

DTYPE_BYTES = {name: size for size, names in _SIZES_BY_BYTES.items() for name in names.split()}


def comm_args_table(records: Iterable[CommRecord]) -> pd.DataFrame:
    """Make a table of schema COMM_ARGS in the order of the events, its texts as categories."""
    ordered = sorted(records, key=lambda record: record[0])
    columns = list(zip(*ordered, strict=True)) or [()] * len(COMM_ARGS)
    table: dict[str, Any] = {
        name: as_category(list(column)) if dtype == "str" else column
        for (name, dtype), column in zip(COMM_ARGS.items(), columns, strict=True)
    }
    return make_table(COMM_ARGS, table)
