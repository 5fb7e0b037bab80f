"""Parts of the backwards of a rank, from marks of recompute and from the operators in the nodes of autograd's engine.

A node computes with gradients off. An operator of a forward that runs inside one with gradients on, so that it has a sequence
number, is one of a forward that runs again (``torch.utils.checkpoint`` and its like, once a node asks for what was not saved):
that lasts from the node's first operator to the end of the last such one. A program's Function has a number with gradients
off as well (a gather's backward applies a scatter): it is of a forward where operators of torch in its node have one. The node
of a linear layer multiplies matrices twice: for the gradient of its input, then for that of its weights (``addmm`` and ``mm``
in torch's ``derivatives.yaml``; so do the layers of Megatron-LM). Gradients of weights are also those of embeddings, and their
sums over microbatches (``AccumulateGrad``).
"""

from __future__ import annotations

import re

import numpy as np

from pptrace.intervals import EMPTY, Int64, NestedIntervals, union
from pptrace.marks import SpanKind
from pptrace.model.device import BackwardParts, DeviceWork, Rows
from pptrace.model.traces import Category, Events, is_of_forward
from pptrace.recognise.ops.infer_from_operators import ENGINE, engine_nodes
from pptrace.recognise.ops.mark_ranges import KINDS_OF_SPANS, MarkedRanges

_PRODUCT = re.compile(r"aten::(?:add)?mm_?$")
_OF_WEIGHTS = re.compile(rf"aten::embedding_dense_backward$|{re.escape(ENGINE)}: torch::autograd::AccumulateGrad$")
_OPERATOR = re.compile(r"^aten::")
_NEVER = np.iinfo(np.int64).max
_FEW = 0.1
"""Part of the time of matrix products that may be in nodes with one of them, or with more than two."""
_MOST_AGAIN = 0.5
"""Part of the nodes beyond which forwards in them are no recompute: of a backward that is differentiated, all are."""


def backward_parts(events: Events, marks: MarkedRanges, work: DeviceWork) -> BackwardParts:
    """The parts of a rank's backwards, as far as its marks and operators tell them."""
    nodes = engine_nodes(events)
    at = marks.spans["at"][marks.spans["kind"] == KINDS_OF_SPANS.index(SpanKind.RECOMPUTE)]
    if not len(nodes) and not len(at):
        return BackwardParts()
    again = union(marks.start_ns[at], marks.end_ns[at]) if len(at) else _forwards_in(events, nodes)
    if again is None:
        why = "its backwards are differentiated themselves, so that forwards in them may be anything"
        return BackwardParts(no_recompute=why, no_weights=why)
    parts = BackwardParts(_executed(work, again), no_recompute="")
    if not len(nodes):
        return parts
    weights = _of_weights(events, nodes, again)
    if weights is None:
        why = "which of its matrix products are of weights is not known: nodes of autograd have one alone, or many"
        return BackwardParts(parts.recompute, no_recompute="", no_weights=why)
    return BackwardParts(parts.recompute, _executed(work, weights), "", "")


def _executed(work: DeviceWork, host: Int64) -> Int64:
    """Times at which what the host ran in a set of times was executed: its kernels, without a device the times themselves."""
    if not len(work) or not len(host):
        return host
    return work.intervals(work.is_compute & NestedIntervals(host[:, 0], host[:, 1]).hold(work.launch_ns))


def _forwards_in(events: Events, nodes: Rows) -> Int64 | None:
    """The times in which nodes run forwards again; None where about every node runs some."""
    is_forward = np.array([is_of_forward(name) for name in events.names], dtype=np.bool_)
    is_operator = events.named(_OPERATOR)
    chosen = (events.category == Category.CPU_OP) & (events.correlation >= 0)
    chosen &= (is_forward | is_operator)[events.name_id]
    operators = events.rows_by_thread(events.rows_named(_OPERATOR, Category.CPU_OP))
    starts, ends = [EMPTY[:, 0]], [EMPTY[:, 0]]
    for rows, inside, around in _in_nodes(events, nodes, np.flatnonzero(chosen)):
        has_gradients = np.isin(around, around[is_operator[events.name_id[inside]]])
        kept = has_gradients & is_forward[events.name_id[inside]]
        inside, around = inside[kept], around[kept]
        again, first = np.unique(around, return_index=True)
        begins = events.start_ns[operators.get(int(events.thread[rows[0]]), inside)]
        node = events.start_ns[rows[again]]
        starts.append(
            np.minimum(events.start_ns[inside[first]], np.append(begins, _NEVER)[np.searchsorted(begins, node)])
        )
        ends.append(np.maximum.reduceat(events.ends_of(inside), first))
    start, end = np.concatenate(starts), np.concatenate(ends)
    return None if len(start) > _MOST_AGAIN * len(nodes) else union(start, end)


def _of_weights(events: Events, nodes: Rows, again: Int64) -> Int64 | None:
    """The times in which nodes compute gradients of weights, or add them up; None where it is not clear what products are for."""
    products = events.rows_named(_PRODUCT, Category.CPU_OP)
    products = products[~NestedIntervals(again[:, 0], again[:, 1]).hold(events.start_ns[products])]
    found, clear, total = [events.rows_named(_OF_WEIGHTS, Category.CPU_OP)], 0, 0
    for _, inside, around in _in_nodes(events, nodes, products):
        _, first, count = np.unique(around, return_index=True, return_counts=True)
        pairs = first[count == 2]
        found.append(inside[pairs + 1])
        clear += int(events.dur_ns[inside[np.concatenate((pairs, pairs + 1))]].sum())
        total += int(events.dur_ns[inside].sum())
    if not total or clear < (1 - _FEW) * total:
        return None
    rows = np.concatenate(found)
    return union(events.start_ns[rows], events.ends_of(rows))


def _in_nodes(events: Events, nodes: Rows, operators: Rows) -> list[tuple[Rows, Rows, Rows]]:
    """Nodes of each thread: (its nodes, the operators inside them by node and start, the index of the innermost node of each)."""
    parts, by_thread = [], events.rows_by_thread(operators)
    for thread, rows in events.rows_by_thread(nodes).items():
        inside = by_thread.get(thread, operators[:0])
        around = events.intervals_of(rows).innermost(events.start_ns[inside])
        inside, around = inside[around >= 0], around[around >= 0]
        if len(inside):
            order = np.argsort(around, kind="stable")
            parts.append((rows, inside[order], around[order]))
    return parts
