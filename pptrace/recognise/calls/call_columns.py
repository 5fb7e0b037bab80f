"""Communication calls of a rank while their events are gathered, as columns: a trace has hundreds of thousands of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.model.categories import as_category, category_of_codes
from pptrace.model.tables import Int64
from pptrace.recognise.device.communication_names import KINDS, kind_of
from pptrace.slices import Slice

CODE_OF_KIND: Mapping[str, int] = {kind: code for code, kind in enumerate(KINDS)}
"""The codes of the kinds of calls; 0 is none."""
HINTS = ("", "ep", "tp")
"""The axes that a library may serve, by their codes."""

COLUMNS: Mapping[str, tuple[str, int]] = {
    "kind": ("int8", 0),  # index into KINDS
    "thread": ("int64", -1),
    "start_ns": ("int64", 0),
    "until_ns": ("int64", 0),  # where the host call returned
    "end_ns": ("int64", -1),  # where the communication was done, as far as an event of the host shows that
    "local_peer": ("int64", -1),
    "args": ("int64", -1),  # row of the table of communication arguments
    "shapes": ("int64", -1),  # row of the same with its recorded shapes and splits
    "elements": ("int64", -1),  # of its input, as recorded shapes tell them
    "num_bytes": ("int64", -1),  # of its message, as recorded shapes tell them
    "worker": ("int64", -1),  # thread that ran its work, where that is sure
    "hint": ("int8", 0),  # index into HINTS
    "of_library": ("bool", 0),  # known by NCCL's own range alone, which does not say what it is part of
    "on_worker": ("bool", 0),  # the range of a work without the call that posted it
    "is_enqueued": ("bool", 0),  # a device does it later: no worker thread runs it
    "in_parts": ("bool", 0),  # several works may do it
    "is_functional": ("bool", 0),
    "kernel": ("int64", -1),  # the first of its kernels and copies, as an event
    "kernel_start_ns": ("int64", 0),  # when the first of them begins, and the last ends
    "kernel_end_ns": ("int64", 0),
}
"""The columns of calls, their types, and the values where nothing is known: *calls* in this folder are slices of them."""


def make_calls(num_calls: int, columns: Mapping[str, npt.NDArray[Any]]) -> Slice:
    """Make so many calls with some columns; the others hold what stands for unknown."""
    made = {
        name: np.asarray(columns[name], dtype=dtype) if name in columns else np.full(num_calls, unknown, dtype=dtype)
        for name, (dtype, unknown) in COLUMNS.items()
    }
    return Slice(made)


class CommArgs:
    """The communication arguments of a rank's events (schema ``COMM_ARGS``) by event; the last row of an event counts."""

    def __init__(self, table: pd.DataFrame) -> None:
        self._table = table
        event = table["event"].to_numpy()
        self._order = np.argsort(event, kind="stable")
        self._events = event[self._order]
        self._codes: dict[str, tuple[Int64, Sequence[str]]] = {}

    def rows_of(self, events: npt.NDArray[np.integer[Any]]) -> Int64:
        """The row of each of these events, −1 where it has none."""
        index = np.searchsorted(self._events, events, side="right") - 1
        is_known = np.append(self._events, -1)[index] == events
        rows: Int64 = np.where(is_known, np.append(self._order, -1)[index], -1)
        return rows

    def numbers(self, name: str, rows: Int64) -> Int64:
        """A column of numbers in some rows; −1 for the row −1."""
        values: Int64 = np.append(self._table[name].to_numpy(), -1).astype(np.int64)[rows]
        return values

    def texts(self, name: str, rows: Int64) -> pd.Categorical[Any]:
        """A column of texts in some rows; "" for the row −1."""
        codes, texts = self.codes(name)
        return category_of_codes(codes[rows], texts)

    def kinds(self, rows: Int64) -> Int64:
        """The code of the kind that the arguments in some rows name, 0 without one."""
        codes, texts = self.codes("collective")
        return np.array([CODE_OF_KIND[kind_of(text)] for text in texts], dtype=np.int64)[codes[rows]]

    def message_bytes(self, rows: Int64) -> Int64:
        """Bytes of the larger of input and output; −1 where they were not recorded."""
        return np.maximum(self.numbers("in_bytes", rows), self.numbers("out_bytes", rows))

    def codes(self, name: str) -> tuple[Int64, Sequence[str]]:
        """(for each row, and for the row −1 at the end, an index into the texts; the texts) of a column of texts."""
        if name not in self._codes:
            column = self._table[name].array
            column = column if isinstance(column, pd.Categorical) else as_category(self._table[name])
            texts = [*map(str, column.categories), ""]
            self._codes[name] = np.append(column.codes.astype(np.int64), len(texts) - 1), texts
        return self._codes[name]
