"""Extent of what is tested: what continuous integration has time for, or everything where PPTRACE_ALL is set."""

from __future__ import annotations

import os

ALL = "PPTRACE_ALL" in os.environ
