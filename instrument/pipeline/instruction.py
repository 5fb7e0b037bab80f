"""What the runtime executes at once: one compute action, or a group of sends and receives."""

from __future__ import annotations

from pptrace.schedule.actions import Action

Instruction = tuple[Action, ...]


class Posted(tuple[Action, ...]):
    """A group of sends and receives that is only posted: the action that reads a receive waits for it.

    Any other group is awaited before the next instruction.
    """

    __slots__ = ()
