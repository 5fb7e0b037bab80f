"""Mutation score of the schedules, clocks, timelines and analyses: of small changes to their code, how many fail a test?

    python tools/mutants.py [--sample 300] [--seed 0] [--all] [--only TEXT ...] [--jobs 1]

Which changes there are, and what is left alone: see ``mutations.py``; ``equivalent_mutants.txt`` lists those that no
test can notice, with the reason. The sample is drawn from each package in proportion to its mutants, with ``--only`` from those
that have a text. Exits with 1 where less than 85 % are killed.

Tests run once without a change to learn which lines each executes (``mutation_tests.py``); those that fail even so are named,
and judge nothing. Each mutant is tried in a fork of a process that has collected the tests: it changes the code of the function
in place, or imports the project again where the change is outside of functions, and runs the tests that execute the changed
lines, those in the folder that mirrors its own and the fastest first, then others of the same files, up to ``BUDGET_S`` of
processor time: a mutant that only a slower test would kill counts as surviving. One that takes many times as long as it should is
killed. Examples of hypothesis are the same each time.

Why no library: cosmic-ray starts all tests anew for every mutant, three minutes each here. mutmut 3 leaves out properties, other
decorated functions and whatever a module says outside of functions, chooses tests by function and not by line or time, and on a
busy machine its first run of these tests, through its trampolines, had not ended after nine minutes.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import random
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location
from inspect import CO_NEWLOCALS
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.mutation_tests import PACKAGES, Children, Plugin, choose_tests, measure, run_pytest  # noqa: E402
from tools.mutations import Mutant, mutants_of, mutated  # noqa: E402

PROJECT = ("pptrace", "instrument", "dashboards")
TARGET = 0.85
LEAST = 12
"""Mutants of a package in any sample."""
START_S = 4.0
"""Processor time to import the project again, s."""
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")


class _Changed(SourceFileLoader):
    """Imports one module with a change."""

    index: int

    def get_code(self, fullname: str) -> CodeType:
        return compile(mutated(Path(self.path), self.index), self.path, "exec", dont_inherit=True)


class _Finder:
    def __init__(self, mutant: Mutant) -> None:
        self._path, self._index, self._module = ROOT / mutant.path, mutant.index, module_of(mutant.path)

    def find_spec(self, name: str, *_: object) -> Any:
        if name != self._module:
            return None
        loader = _Changed(name, str(self._path))
        loader.index = self._index
        return spec_from_file_location(name, self._path, loader=loader)


def module_of(path: str) -> str:
    return ".".join(Path(path).with_suffix("").parts)


def put_into_function(path: Path, index: int) -> bool:
    """Change the function of an imported module; False where the change is outside of functions."""
    before, after = (
        _functions_of(compile(tree, str(path), "exec", dont_inherit=True))
        for tree in (ast.parse(path.read_bytes()), mutated(path, index))
    )
    changed = [name for name in before if before[name] != after.get(name)]
    if len(changed) != 1 or changed == [""]:
        return False
    owner: Any = sys.modules[module_of(str(path.relative_to(ROOT)))]
    for part in changed[0].split("."):
        owner = getattr(owner, "__dict__", {}).get(part)
    for wrapped in ("fget", "func", "__func__", "__wrapped__"):
        owner = getattr(owner, wrapped, owner)
    try:
        owner.__code__ = after[changed[0]]
    except (AttributeError, ValueError):  # another set of free variables, or no function
        return False
    return True


def _functions_of(code: CodeType) -> dict[str, object]:
    """The code of each function and method by qualified name; what is outside of them, by an empty name."""
    functions: dict[str, object] = {}
    outside: list[object] = []
    bodies = [code]
    while bodies:
        body = bodies.pop()
        outside += [body.co_code, body.co_names]
        for constant in body.co_consts:
            if not isinstance(constant, CodeType):
                outside.append((type(constant), constant))
            elif constant.co_flags & CO_NEWLOCALS:
                functions[constant.co_qualname] = constant
            else:
                bodies.append(constant)
    return functions | {"": outside}


def run_mutant(mutant: Mutant, tests: Sequence[str], items: dict[str, Any]) -> int:
    """0 where the tests pass with it; runs in a child."""
    if not put_into_function(ROOT / mutant.path, mutant.index):
        return _run_anew(mutant, tests)
    for test, following in zip(tests, [*tests[1:], None], strict=True):
        item = items[test]
        item.ihook.pytest_runtest_protocol(item=item, nextitem=items.get(following))
        if item.session.testsfailed:
            return 1
    return 0


def _run_anew(mutant: Mutant, tests: Sequence[str]) -> int:
    """The same where code outside of functions is changed: everything of the project is imported again."""
    for name in [name for name in sys.modules if name.split(".")[0] in (*PROJECT, "tests", "conftest")]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder(mutant))
    order = {test: number for number, test in enumerate(tests)}
    return run_pytest(list(dict.fromkeys(test.split("::")[0] for test in tests)), Plugin(order), "-x")


def draw(mutants: dict[str, list[Mutant]], size: int, seed: int) -> list[Mutant]:
    total = sum(map(len, mutants.values()))
    generator = random.Random(seed)
    drawn = [
        mutant
        for group in mutants.values()
        for mutant in generator.sample(group, min(len(group), max(LEAST, round(size * len(group) / total))))
    ]
    return generator.sample(drawn, len(drawn))


def interval(killed: int, num: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z, share = 1.96, killed / num
    middle, spread = share + z * z / (2 * num), z * math.sqrt(share * (1 - share) / num + (z / (2 * num)) ** 2)
    return (middle - spread) / (1 + z * z / num), (middle + spread) / (1 + z * z / num)


def report(mutants: dict[str, list[Mutant]], survived: dict[str, bool]) -> float:
    """Print the score of each package and of all; the share of all mutants killed, each package with its own weight."""
    total, score, variance = sum(map(len, mutants.values())), 0.0, 0.0
    for package, group in mutants.items():
        tried = [mutant for mutant in group if mutant.name in survived]
        if not tried:
            continue
        killed = sum(not survived[mutant.name] for mutant in tried)
        low, high = interval(killed, len(tried))
        print(
            f"{package:9s} {killed:4d} of {len(tried):4d} killed: {killed / len(tried):6.1%} ({low:.1%} to {high:.1%})"
        )
        weight = len(group) / total
        score += weight * killed / len(tried)
        variance += (weight * (high - low) / 2) ** 2
    print(f"all       {score:6.1%} ± {math.sqrt(variance):.1%} of {total} mutants; target {TARGET:.0%}")
    return score


def read_equivalent() -> dict[str, str]:
    """Reasons by name of mutant; the file has lines ``name | reason``."""
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines() if EQUIVALENT.exists() else []
    pairs = (line.rpartition(" | ") for line in lines if line.strip() and not line.startswith("#"))
    return {name.strip(): reason for name, _, reason in pairs}


def all_mutants() -> dict[str, list[Mutant]]:
    return {
        package: [
            mutant
            for path in sorted((ROOT / "pptrace" / package).rglob("*.py"))
            for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        ]
        for package in PACKAGES
    }


def stale_lines(equivalent: dict[str, str], mutants: dict[str, list[Mutant]]) -> list[str]:
    """Sentences about names in the list of equivalent mutants that no mutant has any more: their code has changed."""
    stale = set(equivalent) - {mutant.name for group in mutants.values() for mutant in group}
    return [f"{EQUIVALENT.name}: no such mutant any more; remove the line: {name}" for name in sorted(stale)]


def with_text(mutants: dict[str, list[Mutant]], texts: Sequence[str]) -> dict[str, list[Mutant]]:
    """Those of which a printed line has one of some texts."""
    return {
        package: [mutant for mutant in group if any(text in _line(mutant) for text in texts)]
        for package, group in mutants.items()
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How many changes to the code fail a test?", fromfile_prefix_chars="@")
    parser.add_argument("--sample", type=int, default=300, metavar="N", help="mutants to try (300)")
    parser.add_argument("--seed", type=int, default=0, help="which sample (0)")
    parser.add_argument("--all", action="store_true", help="try every mutant")
    parser.add_argument(
        "--only", nargs="+", metavar="TEXT", help="draw from the mutants of which a printed line has one of these texts"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (1)")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    os.chdir(ROOT)
    os.environ.pop("PPTRACE_ALL", None)  # the grids of make test-all would be run for each mutant
    equivalent = read_equivalent()
    mutants = all_mutants()
    stale = stale_lines(equivalent, mutants)
    for line in stale:
        print(line)
    if arguments.only:
        mutants = with_text(mutants, arguments.only)
    chosen = draw(mutants, sum(map(len, mutants.values())) if arguments.all else arguments.sample, arguments.seed)
    chosen = [mutant for mutant in chosen if mutant.name not in equivalent]  # the same sample with and without
    if not chosen:
        print("no mutant to try")
        return 1
    measured, failing = measure(Children(arguments.jobs))
    print_failing(failing)
    survived: dict[str, bool] = {}

    def try_all(items: list[Any]) -> None:
        by_name, children = {item.nodeid: item for item in items}, Children(arguments.jobs)
        for number, mutant in enumerate(chosen, 1):
            tests = [test for test in choose_tests(mutant, measured) if test in by_name]
            limit = START_S + 1.5 * sum(measured[test]["seconds"] for test in tests)

            def done(code: int, mutant: Mutant = mutant, number: int = number) -> None:
                survived[mutant.name] = code == 0
                if code == 0 or number % 10 == 0:
                    print(f"[{number}/{len(chosen)}] {'survived: ' + _line(mutant) if code == 0 else ''}", flush=True)

            children.start(lambda mutant=mutant, tests=tests: run_mutant(mutant, tests, by_name), done, limit)
        children.wait()

    run_pytest(list(dict.fromkeys(test.split("::")[0] for test in measured)), Plugin(instead=try_all))
    print_failing(failing)
    print(f"{len(equivalent) - len(stale)} mutants that change nothing are left out ({EQUIVALENT.name})")
    for line in stale:  # again, where it is seen
        print(line)
    score = report({name: group for name, group in mutants.items() if any(m.name in survived for m in group)}, survived)
    return int(score < TARGET)


def print_failing(tests: Sequence[str]) -> None:
    if tests:
        print(f"{len(tests)} tests fail without any change and judge no mutant:", *tests, sep="\n  ", flush=True)


def _line(mutant: Mutant) -> str:
    path, _, change = mutant.name.partition(" ")
    return f"{path}:{mutant.line} {change}"


if __name__ == "__main__":
    sys.exit(main())
