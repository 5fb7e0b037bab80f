"""Part ``samples``: recordings small enough to keep, as folders that can be moved into ``sample_traces/``."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from sample_traces.make import forget_host
from tests.support.device_oracle import expectation
from tests.support.oracle import partition
from tests.support.programs import EXAMPLE, ROOT, pptrace
from tools.gpu.environment import describe_gpu, facts
from tools.gpu.part import Setting, main
from tools.gpu.recorded import GRACE_S, text_of

LIMIT_BYTES = 600_000
"""Of a whole case."""
SCRIPT = EXAMPLE.relative_to(ROOT)
"""Path as the command is given in the checkout: its whole path would name a folder of the machine."""
PRIVATE = re.compile(rb'"/(home|root|work|tmp|opt|usr|mnt)[/"]')
_SMALL = ("--layers", "4", "--hidden", "128", "--seq", "64", "--steps", "5", "--microbatches", "4")
_TP = ("--pp", "2", "--tp", "2", "--sequence-parallel")
_EXPERTS = ("--pp", "2", "--dp", "2", "--ep", "2", "--experts", "4", "--top-k", "2")
_NCCL = ("--backend", "nccl-shared")
CASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gpu_1f1b_p4": _SMALL,
        "gpu_zbv_p2": (*_SMALL, "--pp", "2", "--schedule", "zbv"),
        "gpu_1f1b_p2_tp2": ("--layers", "2", *_SMALL[2:-1], "2", *_TP),
        "gpu_nccl_1f1b_p4": (*_SMALL, *_NCCL),
        "gpu_nccl_graphs_1f1b_p2": (*_SMALL, "--cuda-graphs", *_NCCL),
        "gpu_nccl_experts_pp2_ep2": ("--layers", "2", *_SMALL[2:-1], "2", *_EXPERTS, *_NCCL),
    }
)
"""Name → arguments of the example."""


def part(setting: Setting) -> None:
    for name, arguments in dict(list(CASES.items())[: 1 if setting.dry else None]).items():
        if setting.left_s <= 0:
            setting.skip_rest([name])
            continue
        folder = setting.work / "samples" / name
        with setting.checks.check(name) as figures:
            figures["bytes"] = make(setting, name, arguments, folder)


def make(setting: Setting, name: str, arguments: tuple[str, ...], folder: Path) -> int:
    """Record a case and write what is expected of it; its bytes. A case that is too large, or names a machine, is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    ranks = "2" if name.endswith("_p2") else "4"
    command = ("run", "-n", ranks, "--steps", "3:4", "--no-analyze")
    limit = f"{max(1.0, setting.left_s - GRACE_S):.0f}"
    ended = pptrace(*command, "--timeout", limit, "-o", folder, SCRIPT, *arguments, timeout_s=setting.left_s)
    assert ended.code == 0, text_of(ended)
    forget_host(folder)
    expected = expectation(folder) if torch.cuda.is_available() else partition(folder)
    (folder / "expected.json").write_text(json.dumps(expected) + "\n", encoding="utf-8")
    line = " ".join(("pptrace", *command, "-o", f"sample_traces/{name}", str(SCRIPT), *arguments))
    (folder / "README.md").write_text(_readme(name, line, arguments, expected), encoding="utf-8")
    try:
        _require_fit(folder)
    except AssertionError:
        shutil.rmtree(folder)
        raise
    return sum(path.stat().st_size for path in folder.iterdir())


def _require_fit(folder: Path) -> None:
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size <= LIMIT_BYTES, (
        f"the case takes {size} bytes; expected at most {LIMIT_BYTES}: fewer layers or microbatches"
    )
    for path in folder.iterdir():
        content = _plain(path)
        match = PRIVATE.search(content)
        assert match is None, (
            f"{path.name} names a folder of this machine: {content[match.start() : match.start() + 60]!r}"
        )


def _plain(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def _readme(name: str, command: str, arguments: tuple[str, ...], expected: dict[str, Any]) -> str:
    result = facts()
    versions = ", ".join(f"{package} {result['versions'][package]}" for package in ("torch", "nvtx"))
    gpus = (
        [describe_gpu(index)["name"] for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    by = "NCCL, over sockets" if "nccl-shared" in arguments else "gloo, through host memory"
    where = f"{', '.join(gpus)}, which the ranks share in turns: messages by {by}" if gpus else "no GPU, gloo"
    if "ranks" in expected:
        reader = "an independent reading of kernels and launches, `tests/support/device_oracle.py`"
        about = (
            "of each rank the device time, and each op from its first kernel to its last, from the rank's first op on"
        )
    else:
        reader, about = (
            "an independent reading of the marks, `tests/support/oracle.py`",
            "per step and rank the window's parts",
        )
    return "\n".join(
        (
            f"# {name}: a recording of one training step",
            "",
            f"Command: `{command}`",
            "",
            f"Machine: {where}. Python {result['python']}, {versions}, CUDA {result['cuda']}.",
            "",
            f"Expected (`expected.json`, by {reader}), ns: {about}.",
            "",
        )
    )


if __name__ == "__main__":
    main(part)
