"""Single launches that were lost together with their kernels.

A process numbers all of its calls, recorded or not. Ranges of one name in which it made equally many calls, of which fewer were
recorded, ran the same: what is missing was lost. Where another kernel ran, or none, other calls were made as well. How often
something polls is chance: ranges are alike where their thread polled as often, and no thread that only polls did, as NCCL's
watchdog.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from pptrace.intervals import Int64
from pptrace.model.device import Rows
from pptrace.model.traces import Bool, Category, Events
from pptrace.recognise.device.work import device_rows, kernel_launches, launch_calls

_STEADY = re.compile(
    r"^aten::(?:mm|bmm|addmm|baddbmm|linear|_scaled_mm|_grouped_mm|native_layer_norm(?:_backward)?|_fused_rms_norm(?:_backward)?"
    r"|_(?:flash|efficient|cudnn)_attention_(?:forward|backward)|(?:gelu|silu)(?:_backward)?|embedding|add_?|mul|sum|div)$"
    r"|^(?!.*Convolution)\w+Backward\d*$"
)
"""Operators that launch the same whenever the same is called around them; convolutions try several algorithms."""
_POLLS = re.compile(r"^(?:cuda|hip|cu)(?:Event|Stream)Query")
_LIKE = ["name", "made", "around", "polls"]
_KIND = [*_LIKE, "launches", "code"]
_OUT_OF_ORDER = 0.01
"""Part of the calls with a smaller number than the one before up to which they are numbered as they are made."""
_TIMES = 3
"""Operators with all launches, for one that lacks a launch: the numbers of few calls are equal by chance."""


def lacking_launches(events: Events, calls: Rows) -> Rows:
    """The innermost ranges that lack launches of their like, by start, each as often as it lacks one; ``calls`` are those with a
    number.
    """
    if is_out_of_order(events, calls):
        return calls[:0]
    codes = _codes_of_calls(events, calls)
    launches = np.isin(calls, kernel_launches(events, device_rows(events))[0])
    table = _ranges(events, calls, codes, launches)
    table = table[_have_unlike(table)]
    if table.empty:
        return calls[:0]
    table = table.merge(_numbers_lacking(table, np.unique(codes[launches])), how="left", on=_KIND)
    found = table[table["lacking"] > 0]
    rows, times = found["row"].to_numpy(), found["lacking"].to_numpy(dtype=np.int64)
    innermost = np.append(events.start_ns[rows[1:]] >= events.ends_of(rows[:-1]), True)[: len(rows)]
    return np.repeat(rows[innermost], times[innermost])


def is_out_of_order(events: Events, calls: Rows) -> bool:
    """Return whether calls are not numbered as they are made: their numbers are of something else."""
    falling = np.count_nonzero(np.diff(events.correlation[calls]) <= 0)
    return bool(falling > _OUT_OF_ORDER * len(calls))


def _have_unlike(table: pd.DataFrame) -> Bool:
    """Mark the ranges that have others of their name, with as many calls, of which more or fewer are launches."""
    like = sum(factor * table[name].to_numpy() for factor, name in zip(_FACTORS.tolist(), _LIKE, strict=True))
    _, number = np.unique(like, return_inverse=True)
    launches = table["launches"].to_numpy()
    fewest, most = np.full(len(table), launches.max(initial=0)), np.zeros(len(table), dtype=np.int64)
    np.minimum.at(fewest, number, launches)
    np.maximum.at(most, number, launches)
    mixed: Bool = (fewest < most)[number]
    return mixed


_FACTORS = np.random.default_rng(0).integers(np.iinfo(np.int64).max, size=len(_LIKE)) | 1
"""Factors of a code of several columns."""


def _ranges(events: Events, calls: Rows, code: Int64, launches: Bool) -> pd.DataFrame:
    """The program's ranges and the steady operators between two calls, by start: what of their calls was made and recorded.

    Columns: ``row``; ``name``, without numbers, as a code; ``made``, the number of calls from that before it to that behind it;
    ``around``, a code of these two for operators, 0 for the program's ranges; ``launches`` and ``polls``, the numbers that were
    recorded in it; ``code``, the sum of the codes of its recorded calls, each a ``code``; ``launches`` marks those that launch
    kernels.
    """
    is_operator = (events.category == Category.CPU_OP) & events.named(_STEADY)[events.name_id]
    ranges = np.flatnonzero(is_operator | (events.category == Category.ANNOTATION))
    begun, number = events.start_ns[calls], events.correlation[calls]
    first, beyond = np.searchsorted(begun, events.start_ns[ranges]), np.searchsorted(begun, events.ends_of(ranges))
    known = np.flatnonzero((first > 0) & (beyond < len(calls)))
    without = np.sort(
        np.setdiff1d(events.correlation[device_rows(events)], number)
    )  # work of launches that are missing alone
    known = known[np.searchsorted(without, number[first[known] - 1]) == np.searchsorted(without, number[beyond[known]])]
    polls = events.named(_POLLS)[events.name_id[calls]]
    others = ~np.isin(events.thread[calls], events.thread[calls[launches]])
    total, count, polled, by_others = (
        np.append(0, np.cumsum(of_calls)) for of_calls in (code, launches, polls, others)
    )
    known = known[by_others[beyond[known] + 1] == by_others[first[known] - 1]]
    ranges, first, beyond = ranges[known], first[known], beyond[known]
    return pd.DataFrame(
        {
            "row": ranges,
            "name": events.codes_without_numbers(ranges),
            "made": number[beyond] - number[first - 1],
            "around": np.where(is_operator[ranges], 3 * code[first - 1] + code[beyond], 0),
            "launches": count[beyond] - count[first],
            "polls": polled[beyond] - polled[first],
            "code": total[beyond] - total[first],
        }
    )


def _numbers_lacking(table: pd.DataFrame, of_launches: Int64) -> pd.DataFrame:
    """Number of launches that each kind of range lacks, by :data:`_KIND`; ``of_launches`` are the codes of single launches."""
    kinds = table.groupby(_KIND, as_index=False, sort=False).size()
    pairs = kinds.merge(kinds, on=_LIKE, suffixes=("", "_whole")).rename(columns={"launches_whole": "more"})
    lacking, of_program = pairs["more"] - pairs["launches"], pairs["around"] == 0
    is_one = (lacking == 1) & np.isin((pairs["code_whole"] - pairs["code"]).to_numpy(), of_launches)
    is_usual = (
        of_program | (pairs["size_whole"] >= _TIMES * pairs["size"]) | ((pairs["size"] == 1) & (pairs["launches"] == 0))
    )
    found = pairs.assign(lacking=lacking)[is_usual & (is_one | (of_program & (lacking > 1)))]
    most = found.groupby(_KIND, sort=False)["lacking"].max()
    return most.reset_index()


def _codes_of_calls(events: Events, calls: Rows) -> Int64:
    """A code of each call by its name and those of what it launched: sums of codes tell sets of calls."""
    of_names = np.random.default_rng(0).integers(np.iinfo(np.int64).max >> 1, size=len(events.names))
    codes: Int64 = of_names[events.name_id[calls]]
    rows = device_rows(events)
    launched_by = launch_calls(events, rows)
    known = launched_by >= 0
    np.add.at(codes, np.searchsorted(calls, launched_by[known]), of_names[events.name_id[rows[known]]])
    return codes
