"""Lookups of tests in the buffers of a step."""

from __future__ import annotations

from instrument.pipeline.microbatch_buffers import MicrobatchBuffers


def is_empty(buffers: MicrobatchBuffers) -> bool:
    """Return whether everything has been taken, as at the end of a complete step."""
    held = [value for value in vars(buffers).values() if isinstance(value, dict)]
    assert held, "the buffers keep what they hold elsewhere"
    return not any(held)
