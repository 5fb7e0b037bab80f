"""The layers of each stage of a model, as numbers (``3,4,4,1``) and as Megatron-LM writes them (``Et*3|t*4|t*4|tL``).

The first stage has the embedding besides its layers and the last one the head and the loss; these two may have no layer.

In Megatron-LM's ``--pipeline-model-parallel-layout`` every stage is a row of letters, E for the embedding, t for a transformer
layer, L for the loss, with ``|`` between stages; ``x*3`` is xxx, ``(tt|)*2`` is tt|tt|, and commas mean nothing. Source:
Megatron-LM ``core/transformer/pipeline_parallel_layer_layout.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pptrace.errors import UsageError

_REPEATS = (re.compile(r"\(([^()]+)\)\*(\d{1,7})"), re.compile(r"([EtmL|])\*(\d{1,7})"))
_BETWEEN = re.compile(r"\s*,\s*|\s+")
_MOST = 100_000
"""Letters of the longest layout that is read."""
_MOST_SHOWN = 100
_EXPECTED = "expected layers of each stage such as 3,4,4,1, or Megatron-LM's layout such as Et*3|t*4|t*4|tL"


def read_split(text: str, option: str) -> tuple[int, ...]:
    """The layers of each stage, from numbers or from a layout of Megatron-LM.

    Raises:
        UsageError: it is neither, or has parts that no pipeline here has; ``option`` is what the line blames.
    """
    named = f"{option} {text if len(text) <= _MOST_SHOWN else f'{text[:_MOST_SHOWN]}…'}"
    if not set(text) & set("EtmL|*()"):
        numbers = _BETWEEN.split(text.strip())
        if not all(number.isascii() and number.isdigit() and len(number) < 8 for number in numbers):
            raise UsageError(f"{named}: {_EXPECTED}")
        return tuple(map(int, numbers))
    stages = _unrolled(text, named).split("|")
    letters = "".join(stages)
    if "*" in letters or "(" in letters or ")" in letters:
        raise UsageError(
            f"{named}: expected a number behind every '*', and for every '(' a ')' with *N behind it, none in another"
        )
    if unknown := next((letter for letter in letters if letter not in "EtmL"), None):
        raise UsageError(
            f"{named}: {unknown!r} is nothing that a layout has: E (embedding), t (layer), L (loss), | between stages, "
            "*3 behind a letter or a (group) to repeat it"
        )
    if "m" in letters:
        raise UsageError(f"{named}: m is a layer of multi-token prediction (MTP), which is not known here")
    if letters.replace("t", "") != "EL" or letters[0] != "E" or letters[-1] != "L":
        raise UsageError(f"{named}: expected one E, at the beginning, and one L, at the end")
    if "" in stages:
        raise UsageError(f"{named}: stage {stages.index('')} has nothing; expected a layer at least")
    return tuple(stage.count("t") for stage in stages)


def _unrolled(text: str, named: str) -> str:
    """The letters of a layout without commas, blanks and repetitions: of groups first, then of letters."""
    unrolled = "".join(_BETWEEN.split(text))
    for repeats in _REPEATS:
        if sum(len(found[1]) * int(found[2]) for found in repeats.finditer(unrolled)) > _MOST:
            raise UsageError(f"{named}: more than {_MOST:,} letters; expected fewer repetitions")
        unrolled = repeats.sub(lambda found: found[1] * int(found[2]), unrolled)
    return unrolled


def as_layout(split: Sequence[int]) -> str:
    """A split as Megatron-LM writes it."""
    last = len(split) - 1
    return "|".join(
        f"{'E' * (stage == 0)}{'t' * count if count < 3 else f't*{count}'}{'L' * (stage == last)}"
        for stage, count in enumerate(split)
    )


def fits(split: Sequence[int]) -> bool:
    """Return whether every stage has something: a layer, or the embedding or the loss of the ends."""
    return len(split) > 0 and min(split) >= 0 and all(split[1:-1])
