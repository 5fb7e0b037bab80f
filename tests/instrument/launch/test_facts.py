"""Facts about a process that its trace carries."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from instrument.launch.facts import read_device_id


def test_ranks_have_equal_ids_of_devices_exactly_if_they_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an imitation of torch.cuda with two GPUs; older torch knows no ids."""
    assert torch.cuda.is_available() or read_device_id() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU-{index}"))
    ids = []
    for device in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        ids.append(read_device_id())
    assert ids[0] == ids[2] != ids[1]
    assert all(each is not None and len(each) == 8 for each in ids)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    assert read_device_id() is None
