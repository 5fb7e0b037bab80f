"""A stand-in for ``nsys`` on the PATH: writes down how it was called, runs the child, and leaves an export.

FAKE_NSYS_LOG   where its arguments go, as JSON lines
FAKE_NSYS_PLAN  the schedule of which each rank's recording is made up; "" for no report at all, "none" for one without ranges
FAKE_NSYS_FORM  ".qdstrm" where it finds no importer and leaves a stream; ``nsys export`` then only copies
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pptrace.model.traces import Category
from pptrace.schedule.registry import build
from tests.ingest.nsight_files import Process, Report, write_report
from tests.support.synthetic import MAIN_THREAD, START, Event, record


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[0] == "export":
        shutil.copy(arguments[-1], arguments[-2])
        return 0
    with Path(os.environ["FAKE_NSYS_LOG"]).open("a") as log:
        log.write(json.dumps(arguments) + "\n")
    options = [argument for argument in arguments[1:] if argument.startswith("--")]
    code = subprocess.run(arguments[1 + len(options) :], check=False).returncode
    stem = Path(next(option for option in options if option.startswith("--output=")).partition("=")[2])
    plan = os.environ["FAKE_NSYS_PLAN"]
    if plan:
        facts = [json.loads(path.read_text()) for path in stem.parent.glob("rank*.nsys.json")]
        pids = {item["facts"]["rank"]: item["pid"] for item in facts}
        empty = plan == "none"
        made_up = build("1f1b" if empty else plan, pp=max(len(pids), 2), num_microbatches=4)
        recording = record(made_up, lambda action: 400, 100, device=True)
        other = [Event(Category.ANNOTATION, "data loading", START, START + 5, thread=MAIN_THREAD)]
        processes = [Process(pid, other if empty else recording.events_of(rank)) for rank, pid in pids.items()]
        write_report(Report(processes), stem.with_suffix(os.environ.get("FAKE_NSYS_FORM", ".sqlite")))
    return code


if __name__ == "__main__":
    sys.exit(main())
