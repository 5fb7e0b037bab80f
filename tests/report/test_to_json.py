"""The text of JSON reports."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.report.to_json import dump

FLOATS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(10**6), 10**6).map(lambda n: n / 1e8),
    st.floats(1e14, 1e18),
)
TEXTS = st.text(st.characters(exclude_categories=())) | st.sampled_from(["null", "1e-5", "0.00001", "\x7f\x1f\b"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def test_a_report_is_written_line_by_line_with_any_text_in_it() -> None:
    value = {"a": [1, -0.5, 1e300, [], {}], "b": {"path": 'caf\udce9/\u2028"\\\n'}, "c": None, "d": 2**70}
    assert dump(value) == json.dumps(value, indent=1, ensure_ascii=False)


@given(st.dictionaries(TEXTS, VALUES, max_size=3))
def test_any_value_has_the_text_of_pythons_json(value: dict[str, object]) -> None:
    assert dump(value) == json.dumps(value, indent=1, ensure_ascii=False)


def test_floats_of_numpy_are_floats_and_its_integers_are_refused() -> None:
    assert dump({"a": np.float64(0.00001)}) == '{\n "a": 1e-05\n}'
    with pytest.raises(TypeError, match="int64 is no type of JSON"):
        dump({"a": np.int64(1)})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64("nan")])
def test_what_json_has_no_number_for_is_never_written(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        dump({"share": [value]})
