"""The tables behind a report as CSV files, one per table."""

from __future__ import annotations

from pathlib import Path

from pptrace.workflow.analyse import Analysis


def write_tables(analysis: Analysis, directory: Path) -> None:
    """Write ops.csv, comms.csv and, where the trace has memory events, memory.csv; columns as in pptrace.model.tables.

    Raises:
        OSError: the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    data = analysis.data
    for name, table in (("ops", data.ops), ("comms", data.comms), ("memory", data.memory)):
        if len(table.columns):
            table.to_csv(directory / f"{name}.csv", index=False)
