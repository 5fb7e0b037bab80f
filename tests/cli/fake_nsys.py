"""A stand-in for ``nsys`` on the PATH: writes down how it was called, runs the child, and leaves an export.

FAKE_NSYS_LOG   where its arguments go, as JSON lines
FAKE_NSYS_PLAN  the schedule of which each rank's recording is made up; "" for no report at all
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pptrace.schedule.registry import build
from tests.ingest.nsight_files import Process, Report, write_report
from tests.synthetic import record


def main() -> int:
    arguments = sys.argv[1:]
    with Path(os.environ["FAKE_NSYS_LOG"]).open("a") as log:
        log.write(json.dumps(arguments) + "\n")
    options = [argument for argument in arguments[1:] if argument.startswith("--")]
    code = subprocess.run(arguments[1 + len(options) :], check=False).returncode
    stem = Path(next(option for option in options if option.startswith("--output=")).partition("=")[2])
    plan = os.environ["FAKE_NSYS_PLAN"]
    if plan:
        facts = [json.loads(path.read_text()) for path in stem.parent.glob("rank*.nsys.json")]
        pids = {item["facts"]["rank"]: item["pid"] for item in facts}
        recording = record(build(plan, pp=max(len(pids), 2), num_microbatches=4), lambda action: 400, 100, device=True)
        processes = [Process(pid, recording.events_of(rank)) for rank, pid in pids.items()]
        write_report(Report(processes), stem.with_suffix(".sqlite"))
    return code


if __name__ == "__main__":
    sys.exit(main())
