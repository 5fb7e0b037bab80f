import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import pptrace
from pptrace import marking


@pytest.fixture
def opened() -> Iterator[list[str]]:
    seen: list[str] = []

    @contextmanager
    def opener(name: str, stage: int | None, microbatch: int | None) -> Iterator[None]:
        seen.append(f"+{name} {stage} {microbatch}")
        yield
        seen.append(f"-{name}")

    marking.register(opener)
    yield seen
    marking.register(None)


def test_a_mark_needs_no_torch_and_does_nothing_where_nobody_records() -> None:
    code = """
import sys, pptrace
@pptrace.mark("forward")
def double(x): return 2 * x
with pptrace.mark("step"):
    assert double(3) == 6
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_mark_opens_and_closes_its_range_as_context_manager_and_as_decorator(opened: list[str]) -> None:
    @pptrace.mark("backward", stage=1)
    def countdown(n: int) -> int:
        """Calls itself."""
        return n if n == 0 else countdown(n - 1)

    with pptrace.mark("forward", microbatch=3):
        opened.append("body")
    assert countdown(1) == 0
    assert countdown.__doc__ == "Calls itself."
    assert opened == [
        "+forward None 3",
        "body",
        "-forward",
        "+backward 1 None",
        "+backward 1 None",
        "-backward",
        "-backward",
    ]


def test_one_mark_can_be_entered_inside_itself(opened: list[str]) -> None:
    again = pptrace.mark("data")
    with again, again:
        pass
    assert opened == ["+data None None", "+data None None", "-data", "-data"]


def test_an_error_passes_through_a_mark(opened: list[str]) -> None:
    with pytest.raises(ValueError, match="not finite"), pptrace.mark("forward"):
        raise ValueError("not finite")
    assert opened == ["+forward None None"]  # the opener saw the error too: it did not come to its last line
