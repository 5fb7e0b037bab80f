"""Ranges reach a tool that records NVTX, whichever versions it and nvtx have."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nvtx
import pytest

from instrument import nvtx_ranges
from instrument.nvtx_ranges import INJECTED, open_domain

ROOT = Path(__file__).resolve().parents[2]
TOOL = Path(__file__).with_name("nvtx_tool.c")
PROGRAM = """
from instrument.nvtx_ranges import open_domain
domain = open_domain("pptrace")
for name in ("outer", "inner"):
    domain.push_range(domain.get_event_attributes(message=name))
domain.pop_range()
domain.pop_range()
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to build a tool with")
def test_a_tool_that_lacks_the_extensions_of_nvtx_gets_every_range(tmp_path: Path) -> None:
    library, log = tmp_path / "tool.so", tmp_path / "log"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, TOOL], check=True, timeout=60)
    environ = {**os.environ, INJECTED: str(library), "NVTX_TOOL_LOG": str(log)}
    command = [sys.executable, "-c", PROGRAM]
    subprocess.run(command, check=True, timeout=60, cwd=ROOT, env=environ)
    assert log.read_text().splitlines() == ["push pptrace outer", "push pptrace inner", "pop pptrace", "pop pptrace"]


def test_without_a_tool_there_is_no_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INJECTED, raising=False)
    assert open_domain("pptrace") is None
    monkeypatch.setenv(INJECTED, "/nowhere/tool.so")
    monkeypatch.setenv("NVTX_DISABLE", "1")
    assert open_domain("pptrace") is None


def test_a_tool_that_says_its_domain_is_enabled_gets_nvtx_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SimpleNamespace()
    monkeypatch.delenv(INJECTED, raising=False)
    monkeypatch.setattr(nvtx, "get_domain", lambda name: own)
    assert open_domain("pptrace") is own


def test_the_functions_of_older_versions_are_used_where_domains_have_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    older = SimpleNamespace(
        get_domain=lambda name: SimpleNamespace(),
        push_range=lambda message, domain: calls.append((message, domain)),
        pop_range=lambda domain: calls.append((domain,)),
    )
    monkeypatch.setattr(nvtx_ranges, "nvtx", older)
    monkeypatch.delenv(INJECTED, raising=False)
    assert open_domain("pptrace") is None
    monkeypatch.setenv(INJECTED, "/nowhere/tool.so")
    domain = open_domain("pptrace")
    domain.push_range(domain.get_event_attributes(message="outer"))
    domain.pop_range()
    assert calls == [("outer", "pptrace"), ("pptrace",)]
