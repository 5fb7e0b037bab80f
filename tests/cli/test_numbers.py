"""Numbers of options."""

from __future__ import annotations

import pytest

from tests.support.programs import SAMPLES, pptrace_here


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("simulate", "1f1b", "--pp", "1_0", "--microbatches", "4"), "--pp is '1_0'; expected a whole number"),
        (("simulate", "1f1b", "--pp", "4", "--microbatches", "٤"), "--microbatches is '٤'; expected a whole number"),
        (("simulate", "1f1b", "--pp", "2", "--microbatches", "4", "--forward", "1_0"), "--forward is '1_0'; expected"),
        (("simulate", "zb-auto", "--pp", "2", "--microbatches", "4", "--memory-limit", "1_0"), "'1_0' is not a valid"),
        (("simulate", "1f1b", "--sweep", "--pp", "2,1_0", "--microbatches", "4"), "--pp has '1_0'; expected whole"),
        (("schedule", "show", "1f1b", "--pp", "1_0", "--microbatches", "4"), "'1_0' is not a valid integer"),
        (("whatif", str(SAMPLES / "1f1b_p2"), "--microbatches", "1_0"), "'1_0' is not a valid integer"),
        (("whatif", str(SAMPLES / "1f1b_p2"), "--link-speed", "1_0"), "'1_0' is not a valid float"),
        (("whatif", str(SAMPLES / "1f1b_p2"), "--jobs", "1_0"), "'1_0' is not a valid integer"),
    ],
)
def test_a_number_has_neither_underscores_nor_digits_of_other_scripts(arguments: tuple[str, ...], line: str) -> None:
    ended = pptrace_here(*arguments)
    assert ended.code == 2
    assert line in ended.err
    assert ended.err.count("\n") == 1
