"""pptrace: where did the pipeline-parallel step go, and what would get it back?"""

from pptrace.marking import mark

__all__ = ["__version__", "mark"]
__version__ = "0.1.0"
