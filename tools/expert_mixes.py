"""Random mixes with experts, each trained on its mesh and in one process (float64, three AdamW steps, gradients clipped).

    python -m tools.expert_mixes [--seed 0] [--minutes 5]

Draws meshes within eight ranks, schedules, routers, capacities, dispatchers and whatever else goes with experts, also where no
test combines them, and prints the table of docs/training.md: largest errors of losses and parameters, and mixes of which a
step's marks have other bytes than predicted. Prints each mix that fails, and ends with 1 if one did.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np

from instrument.expert.forced import check_routes
from instrument.models.gpt_config import Recompute
from instrument.optim.clipping import OptimizerSync
from pptrace.errors import PptraceError
from pptrace.schedule.registry import SCHEDULES
from pptrace.sizes.expert_options import (
    Dispatcher,
    DropOrder,
    ExpertOptions,
    Forced,
    Scoring,
    SecondChoice,
    Shared,
    check_experts,
    check_layers,
)
from tests.instrument.expert.test_exact import TOLERANCE, check_predictions
from tests.instrument.models.cases.mixes import HIDDEN, SEQUENCE, Mix, Outcome, train_mixes
from tests.support.pool import Pool, RankFailureError

MOST_RANKS, TOGETHER, TRIES = 8, 4, 12
NOT_FIRM = "rounding decides a choice of experts"


@dataclass(slots=True)
class Row:
    """A line of the table: mixes that ran, their meshes and schedules, the largest errors, mixes with other bytes."""

    mixes: int = 0
    meshes: set[tuple[int, ...]] = field(default_factory=set)
    schedules: set[str] = field(default_factory=set)
    loss_error: float = 0.0
    parameter_error: float = 0.0
    other_bytes: int = 0

    def add(self, mix: Mix, outcomes: Sequence[Outcome], has_other_bytes: bool) -> None:
        self.mixes += 1
        self.meshes.add((mix.pp, mix.dp, mix.cp, mix.tp, mix.ep, mix.etp))
        self.schedules.add(mix.schedule)
        self.loss_error = max(self.loss_error, *(outcome.loss_error for outcome in outcomes))
        self.parameter_error = max(self.parameter_error, *(outcome.parameter_error for outcome in outcomes))
        self.other_bytes += has_other_bytes


def draw_mesh(random: Random) -> Mix:
    """A mesh with ranks that can share experts."""
    while True:
        pp, dp, cp, tp = (random.choice(sizes) for sizes in ((1, 2, 2, 4), *[(1, 1, 2, 4)] * 3))
        if 2 <= pp * dp * cp * tp <= MOST_RANKS:
            break
    ranks = dp * cp * tp
    ep = random.choice([size for size in (1, 2, 4, 8) if ranks % size == 0])
    etp = random.choice([size for size in (1, 2, 4, 8) if ranks % (ep * size) == 0])
    order = "-".join(random.sample(("tp", "cp", "dp", "pp"), 4)) if random.random() < 0.4 else "tp-cp-dp-pp"
    return Mix(pp, tp, cp, dp, ep=ep, etp=etp, order=order, steps=3)


def draw_mix(random: Random, mesh: Mix, folder: Path) -> Mix:
    """A mix on a mesh; it may be one that is refused."""
    is_sequence = mesh.tp > 1 and random.random() < 0.6
    validates = random.random() < 0.15
    drawn = replace(
        mesh,
        schedule="1f1b" if mesh.pp == 1 else random.choice([name for name in SCHEDULES if name != "zb-auto"]),
        sequence=is_sequence,
        overlap=is_sequence and random.random() < 0.3,
        ulysses=mesh.cp if random.random() < 0.15 else 1,
        kv_heads=random.choice((None, None, 2)) if mesh.tp < 4 else None,
        tied=random.random() < 0.5,
        recompute=random.choice(list(Recompute)),
        host_staged=random.random() < 0.1,
        ahead=0 if validates else random.choice((0, 0, 2)),
        bucket_bytes=random.choice((1000, 1 << 22)),
        zero=int(mesh.dp * mesh.cp > 1 and random.random() < 0.5),
        clip=random.choice((0.05, 0.3, 100.0)),
        sync=OptimizerSync.POST_VALIDATION if validates else OptimizerSync.SYNCHRONOUS,
    )
    return replace(drawn, experts=draw_experts(random, drawn, folder))


def draw_experts(random: Random, mix: Mix, folder: Path) -> ExpertOptions:
    every, num = random.choice((1, 1, 1, 2, 3)), mix.ep * random.choice((1, 1, 2, 3, 4))
    layers = len(range(0, mix.layers, every))
    pyramid = tuple(mix.ep * random.choice((1, 2, 3)) for _ in range(layers)) if random.random() < 0.2 else ()
    fewest = min(pyramid, default=num)
    top_k = min(random.choice((1, 2, 2, 3, 8)), fewest)
    scoring = random.choice(list(Scoring) if top_k > 1 else [Scoring.SOFTMAX_BEFORE, Scoring.SIGMOID])
    forced = random.choice([Forced.NONE] * 15 + [each for each in Forced if each is not Forced.NONE])
    is_free = forced is Forced.NONE and scoring is not Scoring.SIGMOID and top_k == 2
    groups, of_token = random.choice([(1, 1)] * 12 + [(2, 1), (2, 2), (4, 2)])
    shared_width = random.choice((0, 0, 8, 16))
    return ExpertOptions(
        max(pyramid, default=num),
        top_k,
        every,
        width=random.choice((None, 8, 24)),
        shared_width=shared_width,
        scoring=scoring,
        scale=random.choice((1.0, 2.5)),
        aux_loss=random.choice((0.0, 0.05, 0.5)),
        z_loss=random.choice((0.0, 0.01)),
        capacity_factor=random.choice((None, None, 0.01, 0.4, 0.7, 1.0, 1.3, 1e6)),
        drop_order=random.choice(list(DropOrder)),
        dispatcher=random.choice(list(Dispatcher)),
        forced=forced,
        bias_rate=random.choice((0.0, 0.01)) if scoring is Scoring.SIGMOID else 0.0,
        jitter=random.choice((0.0, 0.0, 0.2)),
        second=random.choice(list(SecondChoice)) if is_free and groups == 1 else SecondChoice.BEST,
        num_groups=groups,
        groups_per_token=of_token,
        routes=_table(folder, layers, top_k, fewest) if forced is Forced.REPLAYED else None,
        pyramid=pyramid,
        shared=random.choice(list(Shared)) if shared_width else Shared.ADDED,
        overlap=random.random() < 0.5,
    )


def _table(folder: Path, layers: int, top_k: int, experts: int) -> str:
    """A file of routes."""
    path = folder / f"routes-{layers}-{top_k}-{experts}.npy"
    drawn = np.random.default_rng(top_k).random((2, layers, 3, SEQUENCE, experts))
    np.save(path, drawn.argsort()[..., :top_k])
    return str(path)


def draw_mixes(random: Random, folder: Path) -> list[Mix]:
    """Some mixes of one mesh, all with or all without mirrored stages, of those that nothing refuses."""
    mesh, mixes = draw_mesh(random), list[Mix]()
    for _ in range(TRIES):
        try:
            mix = draw_mix(random, mesh, folder)
            assert mix.experts is not None
            check_experts(mix.experts, mix.ep, mix.tp, SEQUENCE // mix.cp)
            check_layers(mix.experts, mix.layers, HIDDEN, mix.etp)
            check_routes(mix.experts, mix.layers, SEQUENCE)
            is_mirrored = [each.plan.num_chains > 1 for each in (mix, *mixes[:1])]
            if mix.plan.chain_length <= mix.layers and len(set(is_mirrored)) == 1:
                mixes.append(mix)
        except PptraceError:
            continue
        if len(mixes) == TOGETHER:
            break
    return mixes


def run_each(pool: Pool, mixes: list[Mix]) -> list[tuple[Mix, list[Outcome]]]:
    """The outcomes of all ranks, without mixes in which rounding decides a choice, or that are refused later."""
    try:
        outcomes = pool.run(train_mixes, mixes, world=mixes[0].world)
    except RankFailureError as failure:
        if len(mixes) > 1:
            return [each for mix in mixes for each in run_each(pool, [mix])]
        if NOT_FIRM not in str(failure) and "UsageError" not in str(failure):
            raise
        return []
    return [(mix, [of_rank[index] for of_rank in outcomes]) for index, mix in enumerate(mixes)]


def other_bytes(mix: Mix, outcomes: list[Outcome]) -> bool:
    """Return whether a mark has other bytes than predicted; updates that are taken back with ZeRO-1 gather later."""
    if mix.sync is OptimizerSync.POST_VALIDATION and mix.zero:
        return False
    try:
        check_predictions(mix, outcomes)
    except AssertionError:
        return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=5)
    options = parser.parse_args()
    random, until, rows = Random(options.seed), time.monotonic() + 60 * options.minutes, defaultdict[str, Row](Row)
    with Pool(size=MOST_RANKS) as pool, tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < until:
            mixes = draw_mixes(random, Path(folder))
            for mix, outcomes in run_each(pool, mixes) if mixes else ():
                assert mix.experts is not None
                has_other_bytes = other_bytes(mix, outcomes)
                rows[mix.experts.dispatcher].add(mix, outcomes, has_other_bytes)
                largest = max(max(outcome.loss_error, outcome.parameter_error) for outcome in outcomes)
                unmarked = any(outcome.unmarked for outcome in outcomes)
                if has_other_bytes or unmarked or not largest < TOLERANCE:
                    print("FAILED", mix, file=sys.stderr)
                    rows["failed"].mixes += 1
    failed = rows.pop("failed", Row()).mixes
    print("| dispatcher | mixes | meshes | schedules | largest error of a loss | of a parameter tensor | other bytes |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, row in sorted(rows.items()):
        words = [name, row.mixes, len(row.meshes), len(row.schedules)]
        print(
            "|",
            " | ".join(map(str, words)),
            f"| {row.loss_error:.1e} | {row.parameter_error:.1e} | {row.other_bytes} |",
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
