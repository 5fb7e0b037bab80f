"""Hooks that are removed leave everything as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from instrument.adapters.hooks import Hooks, Watch


def watch_nothing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
    yield


class Base:
    def method(self) -> str:
        return "method"

    @staticmethod
    def static() -> str:
        return "static"


class Derived(Base):
    pass


@pytest.mark.parametrize(
    ("owner", "name"),
    [(dist.ProcessGroup, "send"), (Base, "method"), (Base, "static"), (Derived, "method"), (dist, "all_reduce")],
)
def test_an_attribute_is_what_it_was(owner: Any, name: str) -> None:
    before, hooks = dict(vars(owner)), Hooks(print)
    hooks.wrap(owner, name, watch_nothing)
    assert vars(owner)[name] is not before.get(name)
    hooks.remove()
    assert vars(owner).get(name) is before.get(name)
    assert (name in vars(owner)) is (name in before)
