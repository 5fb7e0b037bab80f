"""Values as entries of the cache: what was packed comes back, and what does not fit is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
from msgspec import Struct

from pptrace.ingest.job.disk_cache import Packed
from pptrace.ingest.job.packing import DAMAGE, pack, unpack
from pptrace.slices import Slice, Texts

PATH = Path("/home/somebody/run/rank0.json")


class Part(Struct, frozen=True):
    """A value with arrays of all kinds."""

    edges: npt.NDArray[np.int64]
    absent: npt.NDArray[np.float64] | None
    pairs: Mapping[int, tuple[npt.NDArray[np.bool_], int]]
    table: pd.DataFrame
    rows: Slice
    facts: Mapping[str, Any]


def a_part() -> Part:
    texts = Texts(np.array([1, 0, 1], dtype=np.int8), ("B", "F"))
    table = pd.DataFrame(
        {
            "start_ns": np.arange(3),
            "kind": pd.Categorical(["F", "B", "F"]),
            "what": pd.Series(["step", "", "step"], dtype=object),
        }
    )
    rows = Slice({"kind": texts, "stage": np.broadcast_to(np.int64(7), 3)}).where(slice(0, 3))
    pairs = {3: (np.array([True, False]), 4)}
    return Part(np.arange(6).reshape(3, 2).T, None, pairs, table, rows, {"path": str(PATH), "é": [1, None]})


def test_arrays_columns_and_tables_come_back() -> None:
    part = a_part()
    packed = pack(part)
    again = unpack(packed, Part)
    assert again.edges.tolist() == [[0, 2, 4], [1, 3, 5]]
    assert again.absent is None
    assert (again.pairs[3][0].dtype, again.pairs[3][0].tolist(), again.pairs[3][1]) == (np.bool_, [True, False], 4)
    pd.testing.assert_frame_equal(again.table, part.table)
    assert isinstance(again.rows["kind"], Texts)
    assert again.rows["kind"].tolist() == ["F", "B", "F"]
    assert (again.rows["stage"].dtype, again.rows["stage"].tolist()) == (np.int64, [7, 7, 7])
    assert [7] in [values.tolist() for values in packed.arrays.values()], "once"
    assert again.facts == part.facts


def test_empty_tables_come_back() -> None:
    table = pd.DataFrame(
        {"what": np.empty(0, dtype=object), "kind": pd.Categorical([]), "at_ns": np.empty(0, np.int64)}
    )
    pd.testing.assert_frame_equal(unpack(pack(table), pd.DataFrame), table)


def test_arrays_of_another_length_are_refused() -> None:
    packed = pack(a_part())
    for name, values in packed.arrays.items():
        with pytest.raises(DAMAGE):
            unpack(Packed(packed.facts, {**packed.arrays, name: np.append(values, values)}), Part)
        with pytest.raises(DAMAGE):
            unpack(
                Packed(packed.facts, {other: packed.arrays[other] for other in packed.arrays if other != name}), Part
            )


@pytest.mark.parametrize("code", [-1, 2])
def test_codes_of_no_text_are_refused(code: int) -> None:
    packed = pack(a_part())
    coded = [name for name, values in packed.arrays.items() if values.tolist() in ([1, 0, 1], [0, 1, 0])]
    assert len(coded) == 3, "of a category, of objects, and of a slice"
    for name in coded:
        with pytest.raises(DAMAGE, match="codes of no text"):
            unpack(Packed(packed.facts, {**packed.arrays, name: np.array([0, code, 1])}), Part)


@pytest.mark.parametrize(
    "value", [object(), np.array([object()]), np.array(["text"]), pd.DataFrame({"a": [1, "text"]})]
)
def test_what_cannot_come_back_is_not_packed(value: Any) -> None:
    with pytest.raises(TypeError):
        pack({"x": value})


def test_paths_are_in_no_entry_and_those_of_the_reader_come_back() -> None:
    warning = f'"{PATH}": cut, and {PATH.parent} has no other'
    packed = pack([str(PATH), warning], [PATH, PATH.parent])
    assert "somebody" not in packed.facts
    assert unpack(packed, list[str], [Path("/b/ü"), Path("/b")]) == ["/b/ü", '"/b/ü": cut, and /b has no other']


def test_a_bare_name_is_replaced_where_it_is_all_of_a_value() -> None:
    packed = pack({"rank": 1, "path": "rank", "kinds": ["ranked"]}, [Path("rank")])
    assert unpack(packed, dict[str, Any], [Path("b/rank")]) == {"rank": 1, "path": "b/rank", "kinds": ["ranked"]}
