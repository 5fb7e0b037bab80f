"""Facts that ``srun`` gives a task, in the variables that torchrun would set.

nodelist = entry {"," entry}
entry    = prefix [ "[" range {"," range} "]" ] …      gpu[003-007,12],login1
tasks    = count {"," count}                            2(x3),1: three nodes with two tasks each, then one with one
count    = number [ "(x" number ")" ]
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_FIRST_PORT, _NUM_PORTS = 15_000, 20_000


def torchrun_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE and the like for a task of ``srun``, {} outside one; what ``environ`` has already is left out."""
    if "SLURM_PROCID" not in environ or "SLURM_NTASKS" not in environ:
        return {}
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    variables = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"],
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(_tasks_of_node(environ)),
        "MASTER_ADDR": first_host(nodes) or "127.0.0.1",
        "MASTER_PORT": str(_port(environ)),
    }
    return {name: value for name, value in variables.items() if name not in environ}


def first_host(nodelist: str) -> str:
    """The first host of a node list; "" of an empty one."""
    entry = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist.strip())
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", entry[0]) if entry else ""


def tasks_per_node(text: str) -> list[int]:
    """Number of tasks of each node; [] where the text does not give it."""
    counts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()) for part in text.split(",")]
    return [int(match[1]) for match in counts if match for _ in range(int(match[2] or 1))]


def _tasks_of_node(environ: Mapping[str, str]) -> int:
    tasks = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", ""))
    node = environ.get("SLURM_NODEID", "0")
    index = int(node) if node.isdigit() else 0
    return tasks[index] if index < len(tasks) else int(environ.get("SLURM_LOCALID", "0")) + 1


def _port(environ: Mapping[str, str]) -> int:
    """A port that the tasks of a step agree on, and those of other steps seldom have."""
    digits = [environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    job, step = (int(text) if text.isdigit() else 0 for text in digits)
    return _FIRST_PORT + (job + 101 * step) % _NUM_PORTS
