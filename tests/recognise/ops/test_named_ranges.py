"""Ranges that others recorded of what is no op: which names say so, and the step of each."""

from __future__ import annotations

import pytest

from pptrace.model.tables import OPS, make_table
from pptrace.model.traces import Category
from pptrace.recognise.ops.mark_ranges import with_named_ranges
from tests.support.synthetic import Event, make_trace

NAMES = {
    "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__": "DATA",
    "get_batch": "DATA",
    "Data loading": "DATA",
    "[pl][profile][_TrainingEpochLoop].train_dataloader_next": "DATA",
    "save_checkpoint": "CHECKPOINT",
    "model checkpoint": "CHECKPOINT",
    "logging": "LOGGING",
    "log_metrics": "LOGGING",
    "gc.collect": "GC",
    "database": "",
    "checkpoint_wrapper": "",
    "logits": "",
    "dataclass": "",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_what_its_range_is(name: str) -> None:
    steps = [("STEP", step, 100 * step, 100 * step + 80) for step in range(3)]
    kinds, numbers, starts, ends = zip(*steps, strict=True)
    unknown = {column: [-1] * 3 for column in ("rank", "stage", "chunk", "microbatch")}
    texts = {"phase": [""] * 3, "clock": ["host"] * 3, "source": ["label"] * 3, "pair": [""] * 3}
    ops = make_table(OPS, {**unknown, **texts, "kind": kinds, "step": numbers, "start_ns": starts, "end_ns": ends})
    events = make_trace([Event(Category.ANNOTATION, name, 185, 195, thread=1)]).events
    found = with_named_ranges(ops, events).iloc[3:]
    expected = [(NAMES[name], 2 if NAMES[name] == "DATA" else 1, 185, 195)] if NAMES[name] else []
    assert list(zip(found["kind"], found["step"], found["start_ns"], found["end_ns"], strict=True)) == expected
