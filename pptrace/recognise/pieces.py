"""The pieces of a rank's compute, in disjoint times: its kernels, or on hosts without a device its innermost operators and the
ranges that name parts of the model outside of these; each with its class, by its name, and the part of the model that it is for.

What a backward runs is of the part of its forward. Autograd's engine evaluates nodes; the operator of the forward that created a
node has the node's sequence number, which torch counts on each thread. Where several threads counted the same numbers, it is the
operator that the node is named after. Gradients of a parameter are added up (``AccumulateGrad``) right behind the node that they
come from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from pptrace.intervals import NestedIntervals
from pptrace.marks import PART, PREFIX
from pptrace.model.device import CLASSES, DeviceWork, Pieces, Rows, WorkClass
from pptrace.model.tables import Int8, Int32, Int64
from pptrace.model.traces import Bool, Category, Events
from pptrace.recognise.device.work import FEWEST_CONTRADICTING, UNNAMED, device_rows, innermost_ranges, launch_calls
from pptrace.recognise.labels import read_label
from pptrace.recognise.ops.infer_from_operators import ENGINE

_MODULE = "nn.Module: "
_NO_PART = re.compile(rf"(?:gloo|mpi|ucc|[nrhx]ccl):|c10d|ProfilerStep|Optimizer\.|## |{re.escape(PREFIX)}")
"""Ranges that are no part of a model, as labels of ops are none: communication, steps, what the compiler writes, marks."""
_NODE = re.compile(f"^{re.escape(ENGINE)}")
_BACKWARD = re.compile(rf"{re.escape(ENGINE)}|Backward\d*$")
_ACCUMULATION = re.compile("AccumulateGrad$")
_NOT_IN_KEY = re.compile(rf"{re.escape(ENGINE)}: |\w+::|_|Backward\d*$")
"""The part of names that a node and the operator of its forward do not have in common: "AddmmBackward0" is of "aten::addmm"."""


def parts_of(events: Events, calls: Rows) -> tuple[Int32, tuple[str, ...]]:
    """(the part of the model that each call or operator is for, as an index into the names, the names).

    It is a module on the level on which modules are several, inside what only wraps them, else the innermost range that the
    program set; in a node of autograd, unless a range begins there, that of the node's forward; 0 of rows (−1) without any.
    """
    named = _NamedRanges(events)
    ranges = named.around(calls)
    nodes = events.rows_named(_NODE, Category.CPU_OP) if named else np.zeros(0, dtype=np.intp)
    of_forwards = nodes
    if len(nodes):
        of_forwards = _with_accumulations(events, nodes, named.around(forwards_of(events, nodes)))
    around = [events.names[name_id] for name_id in np.unique(events.name_id[of_forwards[of_forwards >= 0]]).tolist()]
    # One may be around all of a forward.
    if len(around) > 1 or any(name.startswith((PART, _MODULE)) for name in around):
        for thread, rows in events.rows_by_thread(nodes).items():
            inside = np.flatnonzero((calls >= 0) & (events.thread[calls] == thread))
            node = events.intervals_of(rows).innermost(events.start_ns[calls[inside]])
            inside, node = inside[node >= 0], rows[node[node >= 0]]
            of_forward = of_forwards[np.searchsorted(nodes, node)]
            chosen = (of_forward >= 0) & (ranges[inside] < node)  # no range that began within the node
            ranges[inside[chosen]] = of_forward[chosen]
    codes: dict[str, int] = {"": 0}
    code_of_name = np.zeros(len(events.names) + 1, dtype=np.int32)
    for name_id in np.unique(events.name_id[ranges[ranges >= 0]]).tolist():
        code_of_name[name_id] = codes.setdefault(events.names[name_id].removeprefix(_MODULE), len(codes))
    name_ids = np.append(events.name_id, len(events.names))  # the last one of those without a range
    return code_of_name[name_ids[ranges]], tuple(codes)


class _NamedRanges:
    """The ranges of a rank that name parts of the model, by thread: modules first."""

    def __init__(self, events: Events) -> None:
        self._events = events
        has_module_name = np.array([name.startswith(_MODULE) for name in events.names], dtype=np.bool_)
        modules = np.flatnonzero((events.category == Category.PYTHON) & has_module_name[events.name_id])
        annotations = np.flatnonzero(_may_be_part(events))
        self._of_threads = [(True, *part) for part in events.rows_by_thread(modules).items()]
        self._of_threads += [(False, *part) for part in events.rows_by_thread(annotations).items()]

    def __bool__(self) -> bool:
        return bool(self._of_threads)

    def around(self, calls: Rows) -> Rows:
        """The row of the range that each call, or operator, is in; -1 without any, and of calls that are not known (-1)."""
        events, around = self._events, np.full(len(calls), -1, dtype=np.intp)
        for is_module, thread, ranges in self._of_threads:
            chosen = np.flatnonzero((calls >= 0) & (around < 0) & (events.thread[calls] == thread))
            if not len(chosen):
                continue
            intervals, times = events.intervals_of(ranges), events.start_ns[calls[chosen]]
            if is_module:
                found = intervals.at_level(times, _level_of_parts(events, ranges, intervals))
            else:
                found = intervals.innermost(times)
            around[chosen] = np.where(found >= 0, ranges[found], -1)
        return around


def forwards_of(events: Events, nodes: Rows) -> Rows:
    """The operator of the forward that created each node of autograd's engine: the last one before it that was recorded with its
    sequence number; -1 where none was, or operators of several threads may be it.
    """
    operators = np.flatnonzero((events.category == Category.CPU_OP) & (events.correlation >= 0))
    operators = operators[~events.named(_BACKWARD, operators)[events.name_id[operators]]]
    numbers, of_operator = np.unique(events.correlation[operators], return_inverse=True)
    number = np.searchsorted(numbers, events.correlation[nodes])
    is_numbered = np.append(numbers, -2)[number] == events.correlation[nodes]
    keys = np.unique([_NOT_IN_KEY.sub("", name).lower() for name in events.names], return_inverse=True)[1]
    found, num_found = np.full(len(nodes), -1, dtype=np.intp), np.zeros((2, len(nodes)), dtype=np.int64)
    for thread in np.unique(events.thread[operators]).tolist():
        chosen = np.flatnonzero(events.thread[operators] == thread)
        order = np.sort(of_operator[chosen] * len(events) + operators[chosen])
        at = np.append(order, -1)[np.searchsorted(order, number * len(events) + nodes) - 1]
        is_one = is_numbered & (at >= 0) & (at // len(events) == number)
        agrees = is_one & (keys[events.name_id[at % len(events)]] == keys[events.name_id[nodes]])
        better = agrees | (is_one & (num_found[0] == 0))
        found[better] = at[better] % len(events)
        num_found += np.stack((is_one, agrees))
    found[(num_found[0] != 1) & (num_found[1] != 1)] = -1
    return found


def _with_accumulations(events: Events, nodes: Rows, ranges: Rows) -> Rows:
    """The ranges of nodes, those that add up gradients with that of the node before them on their thread."""
    is_sum = events.named(_ACCUMULATION, nodes)[events.name_id[nodes]]
    filled = ranges.copy()
    for thread in np.unique(events.thread[nodes]).tolist():
        at = np.flatnonzero(events.thread[nodes] == thread)
        before = np.maximum.accumulate(np.where(is_sum[at], -1, np.arange(len(at))))
        filled[at] = np.where(before >= 0, ranges[at[before]], -1)
    return filled


def _may_be_part(events: Events) -> Bool:
    """Mark the ranges that may name a part of the model."""
    is_range = events.category == Category.ANNOTATION
    may_name = np.zeros(len(events.names), dtype=np.bool_)
    for number in np.unique(events.name_id[is_range]).tolist():
        name = events.names[number]
        may_name[number] = not (_NO_PART.match(name) or read_label(name))
    are_parts: Bool = is_range & may_name[events.name_id]
    return are_parts


def _level_of_parts(events: Events, ranges: Rows, intervals: NestedIntervals) -> int:
    """The level of the outermost modules that are several inside one: wrappers, as of DDP, have one alone. 1 where none are."""
    level, names = intervals.levels, events.name_id[ranges]
    inner = np.flatnonzero(intervals.enclosing >= 0)
    pairs = np.unique(np.stack((intervals.enclosing[inner], names[inner])), axis=1)
    around, num_names = np.unique(pairs[0], return_counts=True)
    several = around[num_names > 1]
    return int(level[several].min()) + 1 if len(several) else 1


_KERNELS: Sequence[tuple[WorkClass, re.Pattern[str]]] = [
    (kind, re.compile(pattern))
    for kind, pattern in (
        (WorkClass.ELEMENTWISE, r"^triton_poi_"),  # the names of neighbours that were fused stand behind it
        (WorkClass.REDUCTION, r"^triton_(?:red|per)_"),
        (
            WorkClass.COPY,
            r"(?i)^mem(?:cpy|set)|copy_kernel|copy_device|CatArray|direct_copy|FillFunctor|transpose_?kernel|n(?:chw|hwc)ToN",
        ),
        (WorkClass.ATTENTION, r"(?i)fmha|flash|attention|_attn|attn_|sdpa|compute_dot_do_o|convert_dq_"),
        (
            WorkClass.MATMUL,
            r"(?i)gemm|gemv|nvjet|Cijk_|wgmma|xmma|splitK|cublas|cutlass|matmul|_mm_|\bdot_kernel|grouped_mm",
        ),
        (WorkClass.MATMUL, r"(?i)^triton_tem_|scudnn|[dw]grad|winograd|conv(?:olve|olution|\d?d)"),
        (WorkClass.LOSS, r"(?i)softmax|cross_?entropy|nll_?loss|NLLCriterion"),
        (WorkClass.NORM, r"(?i)(?:layer|rms|batch|group)_?norm|GammaBeta|RowwiseMoments|\bbn_[bf]w"),
        (WorkClass.NORM, r"\bln_[bf]wd|cu(?:ComputeGradInput|ApplyLayerNorm|ComputePartGrad)"),
        (WorkClass.OPTIMIZER, r"(?i)multi_tensor|adamw?|lamb_|_sgd|fused_?optim"),
        (
            WorkClass.EMBEDDING,
            r"(?i)embedding|compute_grad_weight|krn_partial|sum_and_scatter|indexSelect|index_select|indexing_backward|vectorized_gather|scatter_gather",
        ),
        (WorkClass.RANDOM, r"(?i)dropout|masked_scale|philox|distribution_|bernoulli|curand"),
        (
            WorkClass.REDUCTION,
            r"(?i)reduce_kernel|triton_(?:red|per)_|reduce_1Block|DeviceReduce|cub::.*[Rr]educe|\bsum_",
        ),
        (
            WorkClass.ELEMENTWISE,
            r"(?i)elementwise|pointwise|triton_poi|gelu|silu|swiglu|scalePackedTensor|rope|rotary|arange|elementWise",
        ),
    )
]
"""The first that matches is a kernel's class."""
_OPERATORS: Mapping[WorkClass, str] = {
    WorkClass.MATMUL: "mm bmm addmm baddbmm addbmm addmv addr mv dot linear matmul einsum grouped_mm scaled_mm convolution "
    "conv1d conv2d conv3d mkldnn_linear mkldnn_convolution slow_conv2d_forward slow_conv2d thnn_conv2d cudnn_convolution "
    "miopen_convolution convolution_overrideable",
    WorkClass.NORM: "layer_norm native_layer_norm batch_norm native_batch_norm group_norm native_group_norm rms_norm "
    "fused_rms_norm",
    WorkClass.LOSS: "softmax log_softmax nll_loss nll_loss_forward nll_loss_nd cross_entropy cross_entropy_loss "
    "mse_loss binary_cross_entropy binary_cross_entropy_with_logits smooth_l1_loss l1_loss huber_loss kl_div",
    WorkClass.EMBEDDING: "embedding embedding_dense embedding_renorm index index_select index_put index_put_impl gather "
    "scatter scatter_add index_add",
    WorkClass.RANDOM: "dropout native_dropout bernoulli random normal uniform rand randn randint randperm",
    WorkClass.REDUCTION: "sum mean max min amax amin argmax argmin norm linalg_vector_norm any all cumsum var var_mean std "
    "logsumexp prod topk sort",
    WorkClass.COPY: "copy to to_copy clone contiguous cat stack fill zero zeros zeros_like ones ones_like full full_like "
    "new_zeros new_empty new_empty_strided empty empty_like empty_strided resize select slice narrow_copy repeat pad "
    "constant_pad_nd local_scalar_dense item",
    WorkClass.ELEMENTWISE: "add sub mul div neg exp log log2 pow sqrt rsqrt tanh gelu silu relu sigmoid where masked_fill "
    "maximum minimum clamp clamp_min threshold eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or "
    "bitwise_not arange tril triu ceil floor abs reciprocal addcmul addcdiv lerp sin cos cumprod square rsub",
}
_OF_OPERATORS = {name: kind for kind, names in _OPERATORS.items() for name in names.split()}
_BARE = re.compile(r"^(?:aten|torch|prims)::_*|(?:_backward|_backward_data|_out|_jvp)?_?$")
_ATTENTION = re.compile(r"(?i)scaled_dot_product|(?:flash|efficient|cudnn|fused|self)_?attn|attention")
_OPTIMIZER = re.compile(r"Optimizer\.|aten::_(?:foreach|fused_adam|fused_sgd)")


def classes_of(names: Sequence[str], *, on_device: bool) -> Int8:
    """The class of each kernel, or on hosts of each operator, as its index in :data:`CLASSES`."""
    found = map(_class_of_kernel if on_device else _class_of_operator, names)
    return np.array([CLASSES.index(kind) for kind in found], dtype=np.int8)


@lru_cache(maxsize=4096)
def _class_of_kernel(name: str) -> WorkClass:
    return next((kind for kind, pattern in _KERNELS if pattern.search(name)), WorkClass.OTHER)


@lru_cache(maxsize=4096)
def _class_of_operator(name: str) -> WorkClass:
    if _OPTIMIZER.match(name):
        return WorkClass.OPTIMIZER
    if _ATTENTION.search(name):
        return WorkClass.ATTENTION
    return _OF_OPERATORS.get(_BARE.sub("", name), WorkClass.OTHER)


_NO_OPERATOR = re.compile(
    r"c10d::|record_param_comms|c10d_functional|_c10d|gloo:|nccl:|autograd::engine|torch::autograd|(?!.*(?:::|\.))"
)
"""Communication, and nodes and functions of autograd, whose names have no "::": what these take outside the operators that they
call is overhead."""


@lru_cache(maxsize=4096)
def _may_compute(name: str) -> bool:
    """Return whether a name may be that of an operator that computes."""
    return _NO_OPERATOR.match(name) is None


_PYTHON = CLASSES.index(WorkClass.PYTHON)


def pieces_of(events: Events, work: DeviceWork) -> Pieces:
    """The pieces of the kernels that compute, or of the innermost operators and parts of all threads of a rank without device
    events; of two at once the one that began first.
    """
    if work.missing_device_events or not len(events):
        return Pieces()
    on_device = bool(len(work))
    if on_device:
        rows = device_rows(events)
        callers, rows = (column[work.is_compute] for column in (launch_calls(events, rows), rows))
        start, end = events.start_ns[rows], events.ends_of(rows)
    else:
        computes = np.array([*map(_may_compute, events.names)], dtype=np.bool_)
        is_operator = (events.category == Category.CPU_OP) & computes[events.name_id]
        is_part = _may_be_part(events)
        if not is_operator.any() and not any(name.startswith(PART) for name in events.names):
            return Pieces()
        is_node = events.named(_NODE)[events.name_id] & is_part.any()
        rows = np.flatnonzero(is_operator | is_part | is_node)
        parts = [_innermost(events, of_thread) for of_thread in events.rows_by_thread(rows).values()]
        start, end, rows = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(start, kind="stable")
        start, end, rows = start[order], end[order], rows[order]
        callers = rows
    work_class = classes_of(events.names, on_device=on_device)[events.name_id[rows]]
    if on_device:
        work_class = _by_launches(events, rows, callers, work_class)
    else:
        work_class[~is_operator[rows]] = _PYTHON
    latest = np.append(np.iinfo(np.int64).min, np.maximum.accumulate(end)[:-1]) if len(end) else end
    begin = np.maximum(start, latest)
    chosen = np.flatnonzero(end > begin)
    piece = np.searchsorted(begin[chosen], start, side="right") - 1
    multiplies = np.isin(work_class, _MULTIPLY)
    flops = _flops(events, callers, np.where(multiplies, end - start, 0), piece, chosen)
    may_multiply = multiplies[chosen] | ((work_class[chosen] == _OTHER) & ~_in_torch(events, callers[chosen]))
    flops = np.where(may_multiply, flops, np.maximum(flops, 0))
    part, names = parts_of(events, callers[chosen])
    numbers = events.name_id[rows[chosen]].astype(np.int32)
    return Pieces(begin[chosen], end[chosen], work_class[chosen], part, numbers, names, flops)


_LIGHT = (
    WorkClass.ELEMENTWISE,
    WorkClass.NORM,
    WorkClass.REDUCTION,
    WorkClass.COPY,
    WorkClass.EMBEDDING,
    WorkClass.RANDOM,
    WorkClass.LOSS,
)
"""Work of operators that multiply no matrices."""


def misnamed_products(events: Events, rows: Rows, calls: Rows) -> Bool:
    """Mark the device rows that are products by their names, and were launched by operators that multiply nothing."""
    products = classes_of(events.names, on_device=True) == CLASSES.index(WorkClass.MATMUL)
    misnamed: Bool = products[events.name_id[rows]] & (calls >= 0)
    around = innermost_ranges(events, calls[misnamed])
    ids, index = np.unique(events.name_id[around], return_inverse=True)
    names = [events.names[number] for number in ids.tolist()]
    light = [name.startswith("aten::") and _class_of_operator(name) in _LIGHT for name in names]
    misnamed[misnamed] = (around >= 0) & np.array(light, dtype=np.bool_)[index]
    return misnamed


def _by_launches(events: Events, rows: Rows, calls: Rows, work_class: Int8) -> Int8:
    """The classes of kernels, by the operators that launched them where their names tell none, or contradict these."""
    wrong = events.named(UNNAMED, rows)[events.name_id[rows]]
    if np.count_nonzero(misnamed_products(events, rows, calls)) >= FEWEST_CONTRADICTING:
        wrong[:] = True
    wrong &= calls >= 0
    if not wrong.any():
        return work_class
    around = innermost_ranges(events, calls[wrong])
    of_operators = classes_of(events.names, on_device=False)
    corrected = work_class.copy()
    corrected[wrong] = np.where(around >= 0, of_operators[events.name_id[around]], _OTHER)
    return corrected


_MULTIPLY = tuple(CLASSES.index(kind) for kind in (WorkClass.MATMUL, WorkClass.ATTENTION))
_OTHER = CLASSES.index(WorkClass.OTHER)


def _flops(events: Events, calls: Rows, lengths: Int64, piece: Rows, chosen: Rows) -> Int64:
    """The FLOPs of each piece: those of an operator are of the longest product that it launched, or ran on the host. On the
    host an operator that calls others multiplies nothing outside of these.

    Args:
        events: the events of the rank.
        calls: the call that launched each kernel, or the operator on the host; -1 where it is not known.
        lengths: how long each of these multiplies, ns.
        piece: the piece that each of these is, or in whose time it began.
        chosen: those that are the pieces.
    """
    row, number = events.flops
    operator, around = np.full(len(calls), -1, dtype=np.int64), np.zeros(len(calls), dtype=np.bool_)
    for thread, index in events.rows_by_thread(row).items():
        at = np.flatnonzero(events.thread[row] == thread)
        outermost = ~events.intervals_of(index).are_inside_another()
        inside = np.flatnonzero((calls >= 0) & (events.thread[calls] == thread))
        intervals, begin = events.intervals_of(index[outermost]), events.start_ns[calls[inside]]
        found = intervals.innermost(begin)
        operator[inside] = np.where(found >= 0, at[outermost][found], -1)
        first, beyond = (np.searchsorted(intervals.starts, times) for times in (begin, events.ends_of(calls[inside])))
        around[inside] = (found < 0) & (first < beyond)
    flops = np.where((operator[chosen] < 0) & ~around[chosen], -1, 0)
    of_one = np.lexsort((-lengths, operator))
    of_one = of_one[(np.diff(operator[of_one], prepend=-1) != 0) & (operator[of_one] >= 0)]
    of_one = of_one[piece[of_one] >= 0]  # a kernel without a length, before all others, is in no piece
    known = number[operator[of_one]] >= 0
    flops[piece[of_one[known]]] = np.maximum(flops[piece[of_one[known]]], 0)
    np.add.at(flops, piece[of_one[known]], number[operator[of_one[known]]])
    flops[piece[of_one[~known]]] = -1
    return flops


def _in_torch(events: Events, calls: Rows) -> Bool:
    """Mark the calls inside operators of torch, whose kernels of other names multiply no matrices."""
    rows = events.rows_named(_OF_TORCH, Category.CPU_OP)
    inside = events.are_within(rows, events.thread[calls], events.start_ns[calls])
    return inside & (calls >= 0)


_OF_TORCH = re.compile("^aten::")


def _innermost(events: Events, rows: Rows) -> tuple[Int64, Int64, Rows]:
    """(starts, ends, rows) of the stretches of a thread's time in which each row is the innermost."""
    start, end = events.start_ns[rows], events.ends_of(rows)
    bounds = np.sort(np.concatenate((start, end)), kind="stable")  # merges what is in order already
    bounds = bounds[np.diff(bounds, prepend=bounds[:1] - 1) > 0]
    index = NestedIntervals(start, end).innermost(bounds[:-1])
    inside = np.flatnonzero(index >= 0)
    return bounds[inside], bounds[inside + 1], rows[index[inside]]
