"""Launches that were lost together with their kernels: single ones, and all of a buffer.

Of single ones: a process numbers all of its calls, recorded or not. Ranges of one name in which it made equally many calls, of
which fewer were recorded, ran the same: what is missing was lost. Where another kernel ran, or none, other calls were made as
well. How often something polls is chance: ranges are alike where their thread polled as often, and no thread that only polls did,
as NCCL's watchdog.

Of buffers: CUPTI writes calls and kernels into the same buffers, and drops whole ones. Operators are written by torch: some in a
row that launch elsewhere launch nothing there, and the numbers of the calls before and after them, which count all calls of a
process, are far apart. Products of a host, or of tensors without data, make no calls. Light recordings have no operators: there
it is the program's ranges, as those of ops, that make as many calls as others of their name, and have none.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from pptrace.intervals import Int64
from pptrace.model.device import Rows
from pptrace.model.traces import Bool, Category, Events
from pptrace.recognise.device.work import device_rows, kernel_launches, launch_calls
from pptrace.slices import are_of, places_of_each, reduce_groups

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
    launches = are_of(calls, kernel_launches(events, device_rows(events))[0])
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
    fewest, most = (reduce_groups(end, launches, number, len(table)) for end in (np.minimum, np.maximum))
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
    ranges, first, beyond = _between_calls(
        events, calls, np.flatnonzero(is_operator | (events.category == Category.ANNOTATION))
    )
    number, of_work = events.correlation[calls], events.correlation[device_rows(events)]
    without = np.unique(of_work[~are_of(of_work, number)])  # work of launches that are missing alone
    polls = events.named(_POLLS)[events.name_id[calls]]
    others = ~are_of(events.thread[calls], events.thread[calls[launches]])
    total, count, polled, by_others = (
        np.append(0, np.cumsum(of_calls)) for of_calls in (code, launches, polls, others)
    )
    known = np.searchsorted(without, number[first - 1]) == np.searchsorted(without, number[beyond])
    known &= by_others[beyond + 1] == by_others[first - 1]
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
    of_names = events.numbers_of_names()
    codes: Int64 = of_names[events.name_id[calls]]
    rows = device_rows(events)
    launched_by = launch_calls(events, rows)
    known = launched_by >= 0
    np.add.at(codes, np.searchsorted(calls, launched_by[known]), of_names[events.name_id[rows[known]]])
    return codes


_PRODUCTS = re.compile(
    r"^aten::(?:mm|bmm|addmm|baddbmm|_scaled_mm|_grouped_mm|native_layer_norm(?:_backward)?|_fused_rms_norm(?:_backward)?"
    r"|cudnn_convolution|miopen_convolution|_(?:flash|efficient|cudnn)_attention_(?:forward|backward))$"
)
"""Operators that always launch where their tensors are a device's, and do not call one another."""
_FEWEST, _FEWEST_OF_NCCL = 3, 2
"""Launches that are missing, and calls of NCCL that lack one, which always launch: fewer may be so by chance."""
_OF_NCCL = re.compile(r"^(?:nccl|rccl):")
_USUAL = 0.5
"""Part of the operators, or ranges, of a name that launch, from which on those that do not have lost it."""


def with_lost_calls(events: Events) -> Rows:
    """The ranges of which both a launch and its kernel are missing, by start, each as often as launches are."""
    calls = np.flatnonzero((events.category == Category.RUNTIME) & (events.correlation >= 0))
    if not len(calls):
        return calls
    lacking = lacking_launches(events, calls)
    ranges = _ranges_without_calls(events, calls)
    operators = _launching_nothing(events, calls)
    inside = events.are_within(np.unique(ranges), events.thread[operators], events.start_ns[operators])
    found = np.concatenate((lacking, np.setdiff1d(operators[~inside], lacking), ranges[~np.isin(ranges, lacking)]))
    of_nccl = np.unique(found[events.named(_OF_NCCL, found)[events.name_id[found]]])
    return np.sort(found) if len(found) >= _FEWEST or len(of_nccl) >= _FEWEST_OF_NCCL else found[:0]


def _launching_nothing(events: Events, calls: Rows) -> Rows:
    """The operators, several in a row, that launch nothing where others of their name do."""
    operators = events.rows_named(_PRODUCTS, Category.CPU_OP)
    launches = np.zeros(len(events), dtype=np.bool_)
    for thread, of_thread in events.rows_by_thread(operators).items():
        begun = events.start_ns[calls[events.thread[calls] == thread]]
        first, beyond = (np.searchsorted(begun, at) for at in (events.start_ns[of_thread], events.ends_of(of_thread)))
        launches[of_thread] = first < beyond
    names = events.name_id[operators]
    number = np.bincount(names, minlength=len(events.names))
    launching = np.bincount(names[launches[operators]], minlength=len(events.names))
    operators = operators[(launching > np.maximum(_USUAL * number, _FEWEST - 1))[names]]
    found = [operators[:0]]
    for of_thread in events.rows_by_thread(operators).values():
        turn = np.flatnonzero(np.diff(launches[of_thread], prepend=True))
        in_a_row = [row for row in np.split(of_thread, turn) if len(row) >= _FEWEST and not launches[row[0]]]
        found += [row for row in in_a_row if _num_missing(events, calls, row) >= len(row)]
    return np.sort(np.concatenate(found))


def _ranges_without_calls(events: Events, calls: Rows) -> Rows:
    """The program's outermost ranges in which as many calls were made as in others of their name, most of which launch, and none
    was recorded; each as often as one of the others launches at least.
    """
    ranges = np.flatnonzero(events.category == Category.ANNOTATION)
    if is_out_of_order(events, calls):
        return ranges[:0]
    ranges, first, beyond = _between_calls(events, calls, ranges)
    number = events.correlation[calls]
    launched = np.append(0, np.cumsum(are_of(number, events.correlation[device_rows(events)])))
    launches = launched[beyond] - launched[first]
    made = number[beyond] - number[first - 1]
    names = events.codes_without_numbers(ranges)
    is_empty = first == beyond
    lost = np.zeros(len(ranges), dtype=np.int64)
    for of_name in places_of_each(names).values() if is_empty.any() else ():
        launching = of_name[launches[of_name] > 0]
        if len(launching) >= _FEWEST and len(launching) > _USUAL * len(of_name):
            empty = of_name[is_empty[of_name] & (made[of_name] >= np.median(made[launching]))]
            lost[empty] = launches[launching].min()
    rows = np.sort(np.concatenate([ranges[:0], *events.outermost_of_threads(ranges[lost > 0])]))
    return np.repeat(rows, lost[np.searchsorted(ranges, rows)])


def _num_missing(events: Events, calls: Rows, row: Rows) -> int:
    """The number of calls that were made around some operators and not recorded; 0 where it is not known."""
    first = np.searchsorted(events.start_ns[calls], events.start_ns[row[0]])
    beyond = np.searchsorted(events.start_ns[calls], events.ends_of(row[-1:])[0])
    if first == 0 or beyond == len(calls):
        return 0
    number = events.correlation[calls]
    return int(number[beyond] - number[first - 1] - (beyond - first + 1))


def _between_calls(events: Events, calls: Rows, ranges: Rows) -> tuple[Rows, Rows, Rows]:
    """(the ranges with a call before them and one behind them; the first call of each, if it has one; the one behind it)."""
    begun = events.start_ns[calls]
    first, beyond = np.searchsorted(begun, events.start_ns[ranges]), np.searchsorted(begun, events.ends_of(ranges))
    known = (first > 0) & (beyond < len(calls))
    return ranges[known], first[known], beyond[known]
