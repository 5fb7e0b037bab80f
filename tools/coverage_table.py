"""Writes docs/coverage.md from docs/coverage.csv: what the literature that pptrace implements describes, against the code.

    python tools/coverage_table.py [--write docs/coverage.md]

A row of the table is an item, the texts that describe it, an answer (``yes``, ``partly``, ``no``), how a user gets it, where
the code and its tests are (``path:symbol`` and ``path::name``, several with ``; `` between them), and why not.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.marked_tables import write_or_print

TABLE = Path(__file__).resolve().parents[1] / "docs" / "coverage.csv"
ANSWERS = ("yes", "partly", "no")
SEPARATOR = "; "
INTRODUCTION = """# What the literature describes

Pipeline parallelism and what goes with it, item by item as the field's texts have it, and what of it pptrace does. *Yes*:
a user gets all of it, and a test holds it. *Partly* and *no* say in a sentence why. Options without a command are those of
[the runtime's example](training.md), `instrument/examples/train_gpt.py`.

The texts are Megatron-LM's source, and a log of a run of it; the papers of Megatron-LM (arXiv 1909.08053, 2104.04473,
2205.05198); the Ultra-Scale Playbook of Hugging Face; and as *parallel strategies* overviews of collectives, ZeRO
(1910.02054), zero bubble (2401.10241), Transformer Engine, Ulysses (2309.14509), ring attention (2310.01889), GShard
(2006.16668) and DeepSpeed-MoE (2201.05596).

Written by `python tools/coverage_table.py --write docs/coverage.md` from `docs/coverage.csv`, where rows are added."""
HEADER = ("item", "described by", "", "how, and why not")


def read_rows() -> list[dict[str, str]]:
    """The rows of the table, each by the names of its columns."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def several(cell: str) -> list[str]:
    """The entries of a cell of ``where``, ``test`` or ``source``."""
    return cell.split(SEPARATOR) if cell else []


def page_of(rows: Sequence[dict[str, str]]) -> str:
    """The page: counts by topic, and of each topic a table, with a list of code and tests that opens."""
    topics = list(dict.fromkeys(row["topic"] for row in rows))
    parts = [
        INTRODUCTION,
        _table(("topic", *ANSWERS), [*(_counts(topic, rows) for topic in topics), _counts("", rows)]),
    ]
    for topic in topics:
        of_topic = [row for row in rows if row["topic"] == topic]
        parts.append(f"## {topic}\n\n{_table(HEADER, map(_cells, of_topic))}")
        found = "\n".join(_found(row) for row in of_topic if row["where"])
        parts.append(f"<details><summary>Code and tests</summary>\n\n{found}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def _counts(topic: str, rows: Iterable[dict[str, str]]) -> tuple[str, ...]:
    """A line of the counts; of all topics where none is named."""
    counts = Counter(row["answer"] for row in rows if topic in ("", row["topic"]))
    return (topic or "all", *(str(counts[answer]) for answer in ANSWERS))


def _cells(row: dict[str, str]) -> tuple[str, ...]:
    how = ". ".join(part.removesuffix(".") for part in (row["how"], row["why_not"]) if part)
    return row["item"], ", ".join(several(row["source"])), row["answer"], how


def _found(row: dict[str, str]) -> str:
    """An entry of a topic's list of code and tests."""
    return f"- {row['item']}: " + ", ".join(f"`{entry}`" for name in ("where", "test") for entry in several(row[name]))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="coverage_table.py")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page; left out: print")
    page, text = parser.parse_args(arguments).write, page_of(read_rows())
    write_or_print(text, page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
