"""Signals that reach a rank: when they interrupt its script, and when they wait."""

from __future__ import annotations

import signal

import pytest

from instrument.launch.ending import Ending, Terminated


def make_ending() -> Ending:
    return Ending(save=lambda: None, busy=lambda: None)


def test_sigterm_and_sigint_interrupt_the_script() -> None:
    ending = make_ending()
    with pytest.raises(Terminated) as caught:
        ending._handle(signal.SIGTERM, None)
    assert caught.value.code == 143
    with pytest.raises(KeyboardInterrupt):
        ending._handle(signal.SIGINT, None)


def test_a_signal_during_the_writing_of_a_trace_interrupts_after_it() -> None:
    ending, reached = make_ending(), []

    def save() -> None:
        with ending.hold():
            with ending.hold():
                ending._handle(signal.SIGTERM, None)
                reached.append("inner")
            reached.append("outer")

    with pytest.raises(Terminated):
        save()
    assert reached == ["inner", "outer"]


def test_once_the_script_has_ended_signals_interrupt_nothing() -> None:
    ending = make_ending()
    reached = []
    ending.settle()
    ending._handle(signal.SIGTERM, None)
    reached.append("after SIGTERM")
    with ending.hold():
        ending._handle(signal.SIGINT, None)
        reached.append("held")
    reached.append("after SIGINT")
    assert reached == ["after SIGTERM", "held", "after SIGINT"]


def test_an_error_inside_a_held_part_is_not_replaced_by_a_signal() -> None:
    ending = make_ending()

    def save() -> None:
        with ending.hold():
            ending._handle(signal.SIGTERM, None)
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save()
