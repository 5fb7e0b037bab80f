"""The text of JSON reports."""

from __future__ import annotations

import json

import pytest

from pptrace.report.to_json import dump


def test_a_report_is_written_line_by_line_with_any_text_in_it() -> None:
    value = {"a": [1, -0.5, 1e300, [], {}], "b": {"path": 'caf\udce9/\u2028"\\\n'}, "c": None, "d": 2**70}
    assert dump(value) == json.dumps(value, indent=1, ensure_ascii=False)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_json_has_no_number_for_is_never_written(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        dump({"share": [value]})
