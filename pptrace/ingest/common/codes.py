"""Codes of texts, in order of first appearance; and of the category names of all versions of Kineto."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from pptrace.model.tables import Int32
from pptrace.model.traces import Category

_EMITTED_SUFFIX = re.compile(rb", (?:seq = \d|op_id = \d|sizes = \[)")  # by torch's emit_nvtx
_TORCH_OP = re.compile(r"(?:aten|c10d|c10|_c10d_functional|prims?|quantized|sparse|mkldnn)::|autograd::engine::")

_BY_CATEGORY = {
    Category.CPU_OP: "cpu_op operator",
    Category.ANNOTATION: "user_annotation",
    Category.RUNTIME: (
        "runtime cuda_runtime cuda_driver hip_runtime hip_driver hip_api xpu_runtime xpu_driver mtia_runtime glow_runtime"
        " privateuse1_runtime privateuse1_driver"
    ),
    Category.PYTHON: "python_function python",
    Category.OVERHEAD: "overhead",
    Category.OTHER: (
        "trace async async_cpu_to_gpu async_gpu async_npu ac2g fwdbwd hosttodevice external_correlation cpu_instant_event"
        " collective_comm mtia_insight mtia_workloadd gpu_pm_counter"
    ),
    Category.KERNEL: "kernel concurrent_kernel gpu_op hpu_op mtia_ccp_events",
    Category.MEMCPY: "memcpy gpu_memcpy gpu_memcpy2 memcpy2",
    Category.MEMSET: "memset gpu_memset",
    Category.DEVICE_ANNOTATION: "gpu_user_annotation cuda_profiler_range",
    Category.DEVICE_SYNC: "cuda_sync cuda_event",
}
_CATEGORY_BY_NAME = {name: category for category, names in _BY_CATEGORY.items() for name in names.split()}


class Codes(dict[str | None, int]):
    """Code by text, in order of first appearance."""

    def __missing__(self, text: str | None) -> int:
        self[text] = code = len(self)
        return code

    def of(self, texts: Iterable[str | None]) -> Int32:
        """The code of each text."""
        return np.fromiter(map(self.__getitem__, texts), np.int32)

    @property
    def texts(self) -> list[str]:
        """The text of each code."""
        return [text or "" for text in self]


class RangeCodes(dict[bytes | None, int]):
    """Code of an NVTX or rocTX range by its text, without what torch's emit_nvtx appends; -1 for none.

    Texts with numbers that never repeat are not cached. ``torch_ops`` are the codes of operators of torch.
    """

    def __init__(self, names: Codes) -> None:
        super().__init__({None: -1})
        self.torch_ops: set[int] = set()
        self._names = names
        self._code_by_text: dict[bytes, int] = {}

    def __missing__(self, text: bytes | None) -> int:
        assert text is not None
        match = _EMITTED_SUFFIX.search(text) if b", " in text else None
        if match is None:
            code = self[text] = self._names[text.decode("utf-8", "replace")]
            return code
        without_suffix = text[: match.start()]
        known_code = self._code_by_text.get(without_suffix)
        if known_code is None:
            name = without_suffix.decode("utf-8", "replace")
            known_code = self._code_by_text[without_suffix] = self._names[name]
            if _TORCH_OP.match(name):
                self.torch_ops.add(known_code)
        return known_code


class CategoryCodes(dict[str | None, int]):
    """Category code by the producer's name, case-insensitive; ``unknown`` collects the names that are not in the list."""

    def __init__(self) -> None:
        super().__init__()
        self.unknown: set[str] = set()

    def __missing__(self, name: str | None) -> int:
        category = _CATEGORY_BY_NAME.get((name or "").lower())
        if category is None:
            self.unknown.add(name or "none")
            category = Category.OTHER
        self[name] = int(category)
        return int(category)
