"""Recognition of torch's own schedules, with hooks and in a plain trace: real runs on this machine, as a table.

    python tools/recognition_table.py [--write FILE]

Every stage keeps a record of what it ran, which the recognition has no part in. An op is right if the report has one of its
kind, stage and microbatch on its rank, in its step, at its time. The clocks are those of one machine: their offset is 0.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from pptrace.model.tables import COMPUTE_KINDS
from pptrace.schedule.actions import parse_action
from pptrace.workflow.load import load
from tests.adapters.pipelining_cases import train
from tests.frameworks.torch_cases import SCHEDULES, TorchRun
from tests.support.pool import Pool
from tools.marked_tables import MarkedTable

BEGIN, END = "<!-- recognised by recognition_table.py -->", "<!-- end of what is recognised -->"
COLUMNS = ("schedule", "ranks", "trace", "recognised as", "ops right", "ops wrong", "largest offset", "stated bound")


def measure(pool: Pool, name: str, pp: int, hooked: bool) -> tuple[str, ...]:
    """A row of the table."""
    run = TorchRun(name, pp, 2 * pp)
    with tempfile.TemporaryDirectory() as folder:
        results = pool.run(train, run, folder, hooked, world=pp)
        analysis = load([Path(folder)])
    right, wrong, total = _score(analysis, [ran for _, ran in results])
    clock = analysis.report.clock
    offset = max(abs(value) for value in clock.offsets_ns.values())
    bound = "unknown" if clock.uncertainty_ns is None else f"±{clock.uncertainty_ns / 1e3:,.1f} µs"
    schedule = analysis.report.schedule
    named = schedule.name if not schedule.mismatches else f"{schedule.name}, {len(schedule.mismatches)} mismatches"
    trace = "hooked" if hooked else "plain"
    return name, str(pp), trace, named, f"{right / total:.0%}", str(wrong), f"{offset / 1e3:,.1f} µs", bound


def _score(analysis: Any, ran: list[list[list[Any]]]) -> tuple[int, int, int]:
    """(right, wrong, all): ops that are what the stages say they ran, ops of the report that are not, and all that ran."""
    ops = analysis.data.ops
    compute = ops[ops["kind"].isin(COMPUTE_KINDS) & (ops["stage"] >= 0) & (ops["microbatch"] >= 0)]
    right = wrong = 0
    for rank, steps in enumerate(ran):
        own = compute[compute["rank"] == rank]
        result = {}
        for index, step in enumerate(sorted(own["step"].unique().tolist())):
            for op in own[own["step"] == step].itertuples():
                parts = parse_action(op.pair).parts if op.pair else ()
                for part in parts or (None,):
                    key = (
                        (op.kind, op.stage, op.microbatch)
                        if part is None
                        else (str(part.kind), part.stage, part.microbatch)
                    )
                    result[(index, *key)] = op
        truth = {(index, *entry[:3]) for index, entries in enumerate(steps) for entry in entries}
        right += len(truth & result.keys())
        wrong += len(result.keys() - truth)
    return right, wrong, sum(len(entries) for steps in ran for entries in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="put the table between its marks in this file")
    options = parser.parse_args()
    marked = MarkedTable(options.write, BEGIN, END)
    marked.require_markers()
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    with Pool(size=4) as pool:
        for name in SCHEDULES:
            for pp in (2, 4):
                for hooked in (True, False):
                    lines.append(f"| {' | '.join(measure(pool, name, pp, hooked))} |")
                    print(lines[-1], file=sys.stderr, flush=True)
    marked.write("\n".join(lines))


if __name__ == "__main__":
    main()
