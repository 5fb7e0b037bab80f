"""pptrace: where did the pipeline-parallel step go, and what would get it back?"""

__version__ = "0.1.0"
