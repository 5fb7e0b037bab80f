"""Hooks of what writes checkpoints: a range around each, and the same files."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.distributed import checkpoint as distributed
from torch.distributed.checkpoint import state_dict_saver

from instrument.adapters.checkpoint_saves import watch_saves
from instrument.adapters.hooks import Hooks
from tests.adapters.heard import HeardSession

WEIGHTS = {"weight": torch.arange(4.0)}


@dataclass
class NamedRanges:
    """Keeps the names of the ranges that were opened, and those that are."""

    names: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        self.names.append(name)
        self.open.append(name)
        try:
            yield
        finally:
            self.open.remove(name)


def test_what_is_saved_into_a_file_has_a_range_and_what_into_memory_has_none(hooks: Hooks, tmp_path: Path) -> None:
    original, ranges = torch.save, NamedRanges()
    torch.save(WEIGHTS, tmp_path / "plain.pt")
    watch_saves(torch.serialization, hooks, HeardSession(ranges))
    for path in (str(tmp_path / "text.pt"), tmp_path / "path.pt"):
        torch.save(WEIGHTS, path)
    torch.save(obj=WEIGHTS, f=tmp_path / "named.pt")
    torch.save(WEIGHTS, io.BytesIO())
    with pytest.raises(RuntimeError, match="does not exist"):
        torch.save(WEIGHTS, tmp_path / "nowhere" / "lost.pt")
    assert ranges.names == ["pptrace.mark: save checkpoint"] * 4
    assert ranges.open == []
    for name in ("text", "path", "named"):
        assert torch.equal(torch.load(tmp_path / f"{name}.pt")["weight"], WEIGHTS["weight"])
    hooks.remove()
    assert torch.save is original


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_have_a_range_each(hooks: Hooks, tmp_path: Path) -> None:
    ranges = NamedRanges()
    watch_saves(state_dict_saver, hooks, HeardSession(ranges))
    distributed.save(WEIGHTS, checkpoint_id=tmp_path, no_dist=True)
    assert ranges.names == ["pptrace.mark: save checkpoint"]
    loaded = {"weight": torch.zeros(4)}
    distributed.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(loaded["weight"], WEIGHTS["weight"])


def saves_nothing(iteration: int) -> int:
    return iteration + 1


def test_megatrons_save_has_a_range_and_a_module_without_one_is_refused(
    hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron-LM's loop has taken the function by its name before it is hooked."""
    module, loop, other = map(ModuleType, ("megatron.training.checkpointing", "megatron.training.training", "other"))
    ranges = NamedRanges()
    with pytest.raises(AttributeError, match="save_checkpoint"):
        watch_saves(module, hooks, HeardSession(ranges))
    monkeypatch.setattr(saves_nothing, "__module__", module.__name__)
    for each in (module, loop, other):
        vars(each)["save_checkpoint"] = saves_nothing
        monkeypatch.setitem(sys.modules, each.__name__, each)
    watch_saves(module, hooks, HeardSession(ranges))
    assert [each.save_checkpoint(3) for each in (module, loop, other)] == [4, 4, 4]
    assert len(ranges.names) == 2, "the module's and the loop's, not that of another package"
    hooks.remove()
    assert module.save_checkpoint is loop.save_checkpoint is saves_nothing
