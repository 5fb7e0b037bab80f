"""Fields of types that hold values: Structs of msgspec; dataclasses where fields have metadata, or ranks of a run import them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any


def field_names(kind: Any) -> tuple[str, ...]:
    """Names of the fields of a Struct or a dataclass, in their order; () of another type."""
    names: tuple[str, ...] | None = getattr(kind, "__struct_fields__", None)
    if names is None:
        names = tuple(one.name for one in fields(kind)) if is_dataclass(kind) else ()
    return names
