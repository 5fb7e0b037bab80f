"""Readers of traces, one per format, chosen by content, and the opener of what a user gives as PATH."""

from pptrace.ingest.formats import FORMATS, Format, detect, read_file, read_trace
from pptrace.ingest.inputs.resolve import InputFile, OpenedInputs, open_inputs, require_path
from pptrace.ingest.job.read_job import ReadResult, read_each, read_traces
from pptrace.ingest.job.read_progress import JobProgress, OnProgress
from pptrace.ingest.kineto.reader import read_kineto

__all__ = [
    "FORMATS",
    "Format",
    "InputFile",
    "JobProgress",
    "OnProgress",
    "OpenedInputs",
    "ReadResult",
    "detect",
    "open_inputs",
    "read_each",
    "read_file",
    "read_kineto",
    "read_trace",
    "read_traces",
    "require_path",
]
