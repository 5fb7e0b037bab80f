"""pptrace: where did the pipeline-parallel step go, and what would get it back?

    import pptrace

    run = pptrace.load("sample_traces/1f1b_p4")   # what `pptrace analyze` reads
    run.report.typical_step.bubble.ratio          # the typed report; run.ops, run.comms, run.memory as DataFrames
    pptrace.simulate("zb-h1", pp=4, microbatches=8, forward=5.0, backward=10.0).bubble_ratio

Training scripts import pptrace for :func:`mark` alone, so everything else is imported when it is first used.
"""

from pptrace.errors import PptraceError
from pptrace.marking import mark
from pptrace.version import __version__

TYPE_CHECKING = False  # type checkers know this name; importing typing would take longer than all of this
if TYPE_CHECKING:
    from pptrace.analysis.report import Report
    from pptrace.api.catalogue import schedules
    from pptrace.api.compare import RunComparison, compare
    from pptrace.api.estimate import EstimatedRun, estimate
    from pptrace.api.estimate_sweep import estimate_sweep
    from pptrace.api.files import TimelinePicture
    from pptrace.api.hang import HangReport, hang
    from pptrace.api.load import load
    from pptrace.api.run import Run
    from pptrace.api.simulate import SimulatedStep, simulate
    from pptrace.api.sweep import sweep
    from pptrace.api.whatif import Predictions
    from pptrace.schedule.plan import Plan
    from pptrace.schedule.registry import Schedule

__all__ = [
    "EstimatedRun",
    "HangReport",
    "Plan",
    "PptraceError",
    "Predictions",
    "Report",
    "Run",
    "RunComparison",
    "Schedule",
    "SimulatedStep",
    "TimelinePicture",
    "__version__",
    "compare",
    "estimate",
    "estimate_sweep",
    "hang",
    "load",
    "mark",
    "schedules",
    "simulate",
    "sweep",
]


_MODULES = {
    "EstimatedRun": "pptrace.api.estimate",
    "HangReport": "pptrace.api.hang",
    "Plan": "pptrace.schedule.plan",
    "Predictions": "pptrace.api.whatif",
    "Report": "pptrace.analysis.report",
    "Run": "pptrace.api.run",
    "RunComparison": "pptrace.api.compare",
    "Schedule": "pptrace.schedule.registry",
    "SimulatedStep": "pptrace.api.simulate",
    "TimelinePicture": "pptrace.api.files",
    "compare": "pptrace.api.compare",
    "estimate": "pptrace.api.estimate",
    "estimate_sweep": "pptrace.api.estimate_sweep",
    "hang": "pptrace.api.hang",
    "load": "pptrace.api.load",
    "schedules": "pptrace.api.catalogue",
    "simulate": "pptrace.api.simulate",
    "sweep": "pptrace.api.sweep",
}
"""Module of each name that is imported when it is first used."""


if not TYPE_CHECKING:  # to a type checker, a module with __getattr__ would have every name

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
