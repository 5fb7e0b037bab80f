"""Launches that were lost together with their kernels: single ones, and all of a buffer.

CUPTI writes calls and kernels into the same buffers, and drops whole ones. Operators are written by torch: some in a row that
launch elsewhere launch nothing there, and the numbers of the calls before and after them, which count all calls of a process,
are far apart. Products of a host, or of tensors without data, make no calls. Light recordings have no operators: there it is
the program's ranges, as those of ops, that make as many calls as others of their name, and have none.
"""

from __future__ import annotations

import re

import numpy as np

from pptrace.model.device import Rows
from pptrace.model.traces import Category, Events
from pptrace.recognise.device.lost_launches import is_out_of_order, lacking_launches
from pptrace.recognise.device.work import device_rows

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
    begun, number = events.start_ns[calls], events.correlation[calls]
    first, beyond = np.searchsorted(begun, events.start_ns[ranges]), np.searchsorted(begun, events.ends_of(ranges))
    known = np.flatnonzero((first > 0) & (beyond < len(calls)))
    ranges, first, beyond = ranges[known], first[known], beyond[known]
    launched = np.append(0, np.cumsum(np.isin(number, events.correlation[device_rows(events)])))
    launches = launched[beyond] - launched[first]
    made = number[beyond] - number[first - 1]
    names = events.codes_without_numbers(ranges)
    is_empty = first == beyond
    order = np.argsort(names, kind="stable")
    lost = np.zeros(len(ranges), dtype=np.int64)
    for of_name in np.split(order, np.flatnonzero(np.diff(names[order])) + 1) if is_empty.any() else ():
        launching = of_name[launches[of_name] > 0]
        if len(launching) >= _FEWEST and len(launching) > _USUAL * len(of_name):
            empty = of_name[is_empty[of_name] & (made[of_name] >= np.median(made[launching]))]
            lost[empty] = launches[launching].min()
    outermost = [
        of_thread[~events.intervals_of(of_thread).are_inside_another()]
        for of_thread in events.rows_by_thread(ranges[lost > 0]).values()
    ]
    rows = np.sort(np.concatenate([ranges[:0], *outermost]))
    return np.repeat(rows, lost[np.searchsorted(ranges, rows)])


def _num_missing(events: Events, calls: Rows, row: Rows) -> int:
    """The number of calls that were made around some operators and not recorded; 0 where it is not known."""
    first = np.searchsorted(events.start_ns[calls], events.start_ns[row[0]])
    beyond = np.searchsorted(events.start_ns[calls], events.ends_of(row[-1:])[0])
    if first == 0 or beyond == len(calls):
        return 0
    number = events.correlation[calls]
    return int(number[beyond] - number[first - 1] - (beyond - first + 1))
