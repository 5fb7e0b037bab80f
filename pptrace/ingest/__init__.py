"""Readers of traces, one per format, chosen by content, and the opener of what a user gives as PATH."""

from pptrace.ingest.formats import read_file
from pptrace.ingest.inputs.resolve import open_inputs, require_path
from pptrace.ingest.job.read_job import JobProgress, OnProgress, ReadResult, read_each

__all__ = ["JobProgress", "OnProgress", "ReadResult", "open_inputs", "read_each", "read_file", "require_path"]
