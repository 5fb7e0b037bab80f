"""Ranks, mesh coordinates and producers in names and labels of traces, and the table of arguments of communication."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from pptrace.axes import MESH_ORDER
from pptrace.model.tables import COMM_ARGS, as_category, make_table

_RANK = re.compile(r"(?:^|[^a-zA-Z])(?:global[-_ ]?)?ranks?[-_ .:=#]{0,2}(\d{1,9})(?!\d)", re.IGNORECASE)
_WORKER = re.compile(r"(?:^|[^a-zA-Z])worker[-_]?(\d{1,6})(?=[._-]|$)", re.IGNORECASE)
_SUFFIXES = re.compile(r"(?:\.(?:json|pkl|pickle|bin|dump|gz))+$", re.IGNORECASE)
_DIGITS = re.compile(r"(\d+)")
_LAST_NUMBER = re.compile(r"(?:^|\D)(\d{1,9})$")
_COORDINATE = re.compile(
    rf"(?<![a-z])({'|'.join(MESH_ORDER)})[-_ ]?rank[-_ :=#]{{0,2}}(?:\[(\d{{1,6}})\]|(\d{{1,6}})(?!\d))", re.IGNORECASE
)


def natural_order(text: str) -> list[tuple[int, str]]:
    """Sort key in natural order: rank2 before rank10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(text)]


def coordinates_of_label(label: str) -> dict[str, int]:
    """Coordinates on the axes of the mesh, from names such as ``PP rank 3, TP rank 0, compute`` or ``DP rank [1]``."""
    return {match[1].lower(): int(match[2] or match[3]) for match in _COORDINATE.finditer(label)}


def rank_of_value(value: object) -> int | None:
    """Parse a rank written as a number or text; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | str | float):
        return None
    try:
        rank = int(value)
    except (ValueError, OverflowError):
        return None
    return rank if 0 <= rank < 2**31 and (isinstance(value, str) or rank == value) else None


def rank_of_labels(labels: Iterable[str]) -> int | None:
    """Parse the rank from labels such as ``rank 3``; None if no label has one, or they disagree."""
    ranks = {int(match[1]) for label in labels if (match := _RANK.search(label))}
    return ranks.pop() if len(ranks) == 1 else None


def rank_of_file_name(name: str) -> int | None:
    """Parse the rank from names such as ``rank3.json.gz``, ``rank-3.…``, ``worker0.1623.pt.trace.json``."""
    match = _RANK.search(name) or _WORKER.search(name)
    return int(match[1]) if match else None


def rank_of_dump_name(name: str) -> int | None:
    """Parse the rank from a flight-recorder dump's name, whose last number it is: ``nccl_trace_rank_3``, ``job_dump_10``."""
    if (rank := rank_of_file_name(name)) is not None:
        return rank
    match = _LAST_NUMBER.search(_SUFFIXES.sub("", name))
    return int(match[1]) if match else None


def ranks_of(value: object) -> tuple[int, ...]:
    """The ranks in a list or its text; () where it is absent or elided."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return ()
    if not isinstance(value, list) or not all(type(rank) is int and 0 <= rank < 2**63 for rank in value):
        return ()
    return tuple(value)


def producer_of(members: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    """Name the producer: ``torch 2.13.0+cpu kineto``, ``kineto schema 1 (CUDA 12.1)``, or ``chrome trace`` if unknown."""
    versions = metadata.get("versions")
    torch = versions.get("torch") if isinstance(versions, dict) else None
    torch = torch or members.get("torch_version") or members.get("pytorch_version")
    if torch:
        return f"torch {torch} kineto"
    if "schemaVersion" not in members and "deviceProperties" not in members:
        return "chrome trace"
    schema = members.get("schemaVersion")
    name = "kineto" if schema is None else f"kineto schema {schema}"
    cuda, hip = members.get("cuda_runtime_version"), members.get("hip_runtime_version")
    if isinstance(cuda, int) and cuda > 0:
        return f"{name} (CUDA {cuda // 1000}.{cuda % 1000 // 10})"
    if isinstance(hip, int) and hip > 0:  # major * 10^7 + minor * 10^5 + patch
        return f"{name} (HIP {hip // 10**7}.{hip // 10**5 % 100})"
    return name


CommRecord = tuple[int, str, int, int, str, str, str, int, int, int, int, int, str]
"""A row of COMM_ARGS, in the order of the schema."""

_FLOAT8 = "float8_e5m2, float8_e4m3fn, float8_e5m2fnuz, float8_e4m3fnuz, float8_e8m0fnu, float4_e2m1fn_x2"
_SIZES_BY_BYTES = {
    1: f"byte, char, signed char, unsigned char, bool, uint8, int8, qint8, quint8, bits8, {_FLOAT8}, "
    + ", ".join(f"c10::{name}" for name in _FLOAT8.split(", ")),
    2: "short, short int, unsigned short, short unsigned int, half, c10::half, bfloat16, c10::bfloat16, int16, uint16, float16, "
    "bits16",
    4: "int, unsigned int, float, int32, uint32, float32, qint32, complexhalf, c10::complex<c10::half>, complex32",
    8: "long, long int, long long, unsigned long, long unsigned int, double, int64, uint64, float64, complexfloat, "
    "c10::complex<float>, complex64",
    16: "complexdouble, c10::complex<double>, complex128",
}
DTYPE_BYTES = {name: size for size, names in _SIZES_BY_BYTES.items() for name in names.split(", ")}
"""Size by the name of a type in small letters, of torch, of others, and in C++ as compilers write it, bytes."""


def comm_args_table(records: Iterable[CommRecord]) -> pd.DataFrame:
    """Make a table of schema COMM_ARGS in the order of the events, its texts as categories."""
    ordered = sorted(records, key=lambda record: record[0])
    columns = list(zip(*ordered, strict=True)) or [()] * len(COMM_ARGS)
    table: dict[str, Any] = {
        name: as_category(list(column)) if dtype == "str" else column
        for (name, dtype), column in zip(COMM_ARGS.items(), columns, strict=True)
    }
    return make_table(COMM_ARGS, table)
