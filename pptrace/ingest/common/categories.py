"""Map the category names of all versions of Kineto to :class:`pptrace.model.traces.Category`."""

from __future__ import annotations

from pptrace.model.traces import Category

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


class CategoryCodes(dict[str | None, int]):
    """Category code by the producer's name, case-insensitive; ``unknown`` collects the names that are not in the list."""

    def __init__(self) -> None:
        super().__init__({None: int(Category.OTHER), "": int(Category.OTHER)})
        self.unknown: set[str] = set()

    def __missing__(self, name: str | None) -> int:
        category = _CATEGORY_BY_NAME.get((name or "").lower())
        if category is None:
            self.unknown.add(str(name))
            category = Category.OTHER
        self[name] = int(category)
        return int(category)
