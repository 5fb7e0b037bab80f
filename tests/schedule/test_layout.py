"""Layouts of stages as Megatron-LM writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.errors import UsageError
from pptrace.schedule.layout import as_layout, fits, read_split

splits = st.tuples(st.integers(0, 40), st.lists(st.integers(1, 40), max_size=8), st.integers(0, 40)).map(
    lambda parts: (parts[0], *parts[1], parts[2])
)


@given(splits)
def test_a_layout_that_is_written_is_read_as_the_same_split(split: tuple[int, ...]) -> None:
    assert fits(split)
    assert read_split(as_layout(split), "--split") == split
    assert read_split(",".join(map(str, split)), "--split") == split


@pytest.mark.parametrize(
    ("text", "split"),
    [
        *(
            ("Et*3|(tt|)*29,tL", (3, *[2] * 29, 1)),
            ("E|(t|)*3,L", (0, 1, 1, 1, 0)),
            ("EttL", (2,)),
            ("5, 5 3", (5, 5, 3)),
        ),
        *(("Et,t|t*2|*1tL", (2, 2, 1)), ("(Et*2|t)*1,t|L", (2, 2, 0)), ("3, 4,0", (3, 4, 0))),
    ],
)
def test_layouts_are_read(text: str, split: tuple[int, ...]) -> None:
    assert read_split(text, "--split") == split


def test_megatron_reads_the_same_stages() -> None:
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    for text in ("Et*3|(tt|)*29,tL", "E|(t|)*3,L", "EttL", "Et,t|t*2|*1tL", "(Et*2|t)*1,t|L", as_layout((0, 3, 12, 0))):
        stages = layouts.PipelineParallelLayerLayout.parse_str_to_list(text)
        assert tuple(sum(layer.name == "decoder" for layer in stage) for stage in stages) == read_split(text, "--split")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ett|ttmL", "m is a layer of multi-token prediction (MTP), which is not known here"),
        ("Ett|xtL", "'x' is nothing that a layout has"),
        ("E(tt|)tL", "for every '(' a ')' with *N behind it"),
        ("E((t|)*2t)*2L", "for every '(' a ')' with *N behind it, none in another"),
        ("ttE|tL", "expected one E, at the beginning, and one L, at the end"),
        ("Ett|t", "expected one E, at the beginning, and one L, at the end"),
        ("Et|Lt", "expected one E, at the beginning, and one L, at the end"),
        *(("Et||tL", "stage 1 has nothing"), ("E(t*9999|)*9999L", "more than 100,000 letters")),
        ("3,,1", "expected layers of each stage such as 3,4,4,1, or Megatron-LM's layout such as Et*3|t*4|t*4|tL"),
        *(("", "expected layers of each stage"), ("3;1", "expected layers of each stage")),
    ],
)
def test_what_is_no_layout_is_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        read_split(text, "--layout")
    assert message in str(error.value)
    assert str(error.value).startswith(f"--layout {text}: ")
    assert "\n" not in str(error.value)
