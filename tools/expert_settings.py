"""Random command lines of ``train_gpt.py`` with experts, also senseless ones: each is refused in one line before any process
group is made, or trains as one process does (float64, losses of four steps).

    python -m tools.expert_settings [--seed 0] [--minutes 5]

Prints how many were refused and trained, the largest difference of a loss, and each command line that fails; ends with 1 if one
did. :mod:`tools.expert_mixes` compares parameters and bytes too, of settings that fit each other.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from instrument.examples import train_gpt
from instrument.examples.gpt_arguments import make_parser
from instrument.examples.gpt_settings import RankInfo, resolve_settings
from instrument.examples.progress import Progress
from instrument.models.gpt_config import Recompute
from instrument.optim.clipping import OptimizerSync
from pptrace.errors import PptraceError
from pptrace.schedule.registry import SCHEDULES
from pptrace.sizes.expert_options import Dispatcher, DropOrder, Forced, Scoring, SecondChoice, Shared
from tests.support.pool import Pool

MOST_RANKS, STEPS, LAYERS, TOLERANCE = 8, 4, 4, 1e-9
ALONE = {
    **dict.fromkeys(("pp", "dp", "cp", "tp", "ep", "etp", "ulysses", "microbatch_size"), 1),
    **dict.fromkeys(
        ("sequence_parallel", "overlap", "lean", "negotiate", "overlap_experts", "grouped_experts", "memory"), False
    ),
    "schedule": "1f1b",
    **dict.fromkeys(("chunks", "group_size", "memory_limit", "prefetch", "split", "microbatches", "bucket_mb"), None),
    "zero": 0,
    "optimizer_sync": "synchronous",
    "order": "tp-cp-dp-pp",
    "p2p_mode": "batched",
}
"""Options of one process that trains the same."""


def draw(random: Random, folder: Path) -> list[str]:
    """The arguments of a run within eight ranks; any of them may be senseless."""
    words: list[str] = []

    def give(name: str, *values: object, chance: float = 1.0) -> None:
        if random.random() < chance:
            words.extend((f"--{name}", str(random.choice(values))))

    def switch(name: str, chance: float) -> None:
        if random.random() < chance:
            words.append(f"--{name}")

    for axis in ("pp", "dp", "cp", "tp"):
        give(axis, 1, 1, 2, 2, 4)
    give("ep", 1, 2, 2, 4, 8, chance=0.9)
    give("etp", 1, 2, 4, chance=0.3)
    give("experts", 4, 8, 8, 8, 1, 2, 3, 6, 16, "4,8,4,8", "8,8", "4,2,4,8", "8,8,8,8,8", 0, -4, chance=0.98)
    give("top-k", 1, 2, 2, 3, 4, 8, 0, chance=0.6)
    give("expert-every", 1, 2, 3, 7, 0, chance=0.3)
    give("expert-width", 8, 12, 7, 0, chance=0.3)
    give("shared-expert-width", 0, 8, 16, 6, -1, chance=0.4)
    give("shared-expert", *Shared, chance=0.3)
    give("router", *Scoring, chance=0.7)
    give("router-scale", 2.5, 0, "nan", chance=0.1)
    give("router-jitter", 0.1, 1, -0.1, "nan", chance=0.15)
    give("router-groups", 1, 2, 4, 3, 0, chance=0.15)
    give("groups-per-token", 1, 2, 0, chance=0.15)
    give("second-choice", *SecondChoice, chance=0.25)
    give("aux-loss", 0.01, 0.1, -1, "inf", chance=0.4)
    give("z-loss", 0.001, "nan", chance=0.3)
    give("bias-rate", 0.01, -0.1, "nan", chance=0.2)
    give("capacity-factor", 0.01, 0.5, 1, 1.1, 1.25, 10, 1e308, 0, -1, "nan", chance=0.4)
    give("drop-order", *DropOrder, chance=0.3)
    give("dispatcher", *Dispatcher, chance=0.8)
    give("force-routes", *[each for each in Forced if each is not Forced.REPLAYED], chance=0.25)
    give("replay-routes", _table(random, folder), "nowhere.npy", os.devnull, chance=0.08)
    switch("overlap-experts", 0.3)
    switch("grouped-experts", 0.5)
    give("order", "-".join(random.sample(("tp", "cp", "dp", "pp"), 4)), chance=0.2)
    switch("sequence-parallel", 0.4)
    switch("overlap", 0.15)
    give("ulysses", 1, 2, 4, chance=0.15)
    give("zero", 0, 1, 1, 1, 2, 3, chance=0.4)
    give("bucket-mb", 0.001, 1, chance=0.2)
    give("schedule", *SCHEDULES, chance=0.8)
    give("chunks", 1, 2, 3, chance=0.1)
    give("p2p-mode", "batched", "blocking", chance=0.15)
    give("prefetch", 0, 1, 2, chance=0.2)
    switch("negotiate", 0.1)
    switch("tied", 0.3)
    switch("memory", 0.2)
    give("kv-heads", 1, 2, 4, 3, chance=0.2)
    give("recompute", *Recompute, chance=0.5)
    give("recompute-microbatches-beyond", 0, 1, -1, chance=0.1)
    give("clip-grad", 0.05, 1, 100, "nan", chance=0.4)
    give("optimizer-sync", *OptimizerSync, chance=0.2)
    give("seq", 16, 16, 16, 16, 24, 12, 10, 2, 1)
    give("microbatch-size", 1, 1, 2)
    give("global-batch-size", 8, 8, 16, 4, 6)
    for name, value in (("hidden", 16), ("heads", 4), ("layers", LAYERS), ("dtype", "float64"), ("steps", STEPS)):
        give(name, value)
    return words


def _table(random: Random, folder: Path) -> str:
    """A file of routes."""
    top_k, experts, sequence = random.choice((1, 2, 3)), random.choice((4, 8)), random.choice((16, 12))
    path = folder / f"routes-{top_k}-{experts}-{sequence}.npy"
    drawn = np.random.default_rng(top_k).random((2, LAYERS, 3, sequence, experts))
    np.save(path, drawn.argsort()[..., :top_k])
    return str(path)


class _Kept(Progress):
    """Keeps the losses instead of printing them."""

    losses: list[float]

    def add(self, step: int, loss: Tensor) -> None:
        self.losses.append(float(loss))


def losses_of(options: argparse.Namespace, world: int) -> list[float]:
    """Train in the process group that exists, of ``world`` ranks; the losses, empty on ranks that report none."""
    _Kept.losses = []
    settings = resolve_settings(options, RankInfo(0, world, 0, world))
    with patch.object(train_gpt, "Progress", _Kept), patch("builtins.print"):
        train_gpt.train(settings, options)
    return list(_Kept.losses)


def world_of(options: argparse.Namespace) -> int:
    return int(options.pp * options.dp * options.cp * options.tp)


def refusal(options: argparse.Namespace) -> str | None:
    """Return why a run is refused, None if it is not."""
    try:
        resolve_settings(options, RankInfo(0, world_of(options), 0, world_of(options)))
    except PptraceError as err:
        return str(err)
    return None


def compare(pool: Pool, options: argparse.Namespace) -> float:
    """Return the largest difference of a loss from one process."""
    world = world_of(options)
    together = next(filter(None, pool.run(losses_of, options, world, world=world)))
    whole = argparse.Namespace(**vars(options) | ALONE)
    if whole.global_batch_size is None:
        whole.global_batch_size = options.microbatches * options.microbatch_size * options.dp
    alone = pool.run(losses_of, whole, 1, world=1)[0]
    return max(abs(ours - theirs) for ours, theirs in zip(together, alone, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=5)
    given = parser.parse_args()
    random, until = Random(given.seed), time.monotonic() + 60 * given.minutes
    results, largest, reasons = Counter[str](), 0.0, Counter[str]()
    with Pool(size=MOST_RANKS) as pool, tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < until:
            words = draw(random, Path(folder))
            result, difference = _try(pool, words, reasons)
            results[result] += 1
            largest = max(largest, difference)
            if result == "failed":
                print("FAILED", *words, flush=True)
    print(dict(results), f"largest difference of a loss {largest:.1e}")
    for reason, count in reasons.most_common():
        print(f"{count:6d}  {reason}")
    return int(results["failed"] > 0)


def _try(pool: Pool, words: Sequence[str], reasons: Counter[str]) -> tuple[str, float]:
    try:
        options = make_parser().parse_args(words)
        if not 1 <= world_of(options) <= MOST_RANKS:
            return "too many ranks", 0.0
        reason = refusal(options)
        if reason is None:
            difference = compare(pool, options)
            return ("trained" if difference < TOLERANCE else "failed"), difference
    except Exception as err:  # what it is, is the finding
        print(type(err).__name__, str(err)[-1500:], flush=True)
        return "failed", 0.0
    reasons[reason] += 1
    return ("failed" if "\n" in reason or not reason else "refused"), 0.0


if __name__ == "__main__":
    from tools import expert_settings  # ranks import its functions by this name

    torch.set_num_threads(1)
    sys.exit(expert_settings.main())
