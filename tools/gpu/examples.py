"""Part ``examples``: the example trains with options that reach other kernels and other host work of a GPU run."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping
from types import MappingProxyType

import torch

from tests.support.programs import EXAMPLE, pptrace
from tools.gpu.part import Setting, main
from tools.gpu.recorded import GRACE_S, text_of

_MODEL = ("--layers", "8", "--hidden", "256", "--heads", "4", "--seq", "128", "--steps", "12")
_TP = ("--pp", "2", "--tp", "2", "--sequence-parallel", "--overlap")
EXAMPLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "bfloat16 tp sp overlap clipped": (*_MODEL, *_TP, "--dtype", "bfloat16", "--clip-grad", "1", "--memory"),
        "bfloat16 ring and ulysses": (*_MODEL, "--cp", "4", "--ulysses", "2", "--dtype", "bfloat16"),
        "bfloat16 zero 3": (*_MODEL, "--pp", "2", "--dp", "2", "--zero", "3", "--dtype", "bfloat16"),
        "dropout recompute": (*_MODEL, "--dropout", "0.1", "--recompute", "selective", "--schedule", "zb-h1"),
        "bfloat16 zero 1 graphs": (
            *(*_MODEL, "--pp", "2", "--dp", "2", "--zero", "1", "--dtype", "bfloat16"),
            *("--cuda-graphs", "--eval-interval", "4"),
        ),
        "balance": (*_MODEL, "--balance", "--prefetch", "0", "--p2p-mode", "blocking"),
        "sleeping ops": (*_MODEL[:-1], "4", "--sleep-forward", "5", "--sleep-backward", "10"),
    }
)
SMALL: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "bfloat16 tp sp overlap clipped": (
            "--layers",
            "2",
            "--hidden",
            "32",
            "--tp",
            "2",
            *_TP[4:],
            "--steps",
            "8",
            "--memory",
        )
    }
)
_LOSS = re.compile(r"step +\d+ +loss +(\S+) ")


def part(setting: Setting) -> None:
    examples = SMALL if setting.dry else EXAMPLES
    for name, arguments in examples.items():
        if setting.left_s <= 0:
            setting.skip_rest([name])
            continue
        with setting.checks.check(name) as figures:
            figures["losses"] = _train(setting, name, arguments)


def _train(setting: Setting, name: str, arguments: tuple[str, ...]) -> list[float]:
    """First and last loss; the last is the smaller one."""
    folder = setting.work / "examples" / name.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    ranks = "2" if setting.dry else "4"
    limit = f"{max(1.0, setting.left_s - GRACE_S):.0f}"
    command = ("run", "-n", ranks, "--profiler", "none", "--timeout", limit, "-o", folder)
    ended = pptrace(*command, EXAMPLE, *arguments, timeout_s=setting.left_s)
    assert ended.code == 0, text_of(ended)
    losses = [float(loss) for loss in _LOSS.findall(ended.out)]
    assert losses, text_of(ended)
    assert all(map(math.isfinite, losses)), losses
    assert losses[-1] < losses[0], losses
    if "--memory" in arguments:
        assert "memory   rank 0" in ended.out, text_of(ended)
        assert not torch.cuda.is_available() or "MFU" in ended.out, text_of(ended)
    return [losses[0], losses[-1]]


if __name__ == "__main__":
    main(part)
