"""Diagnosis of hangs: a wait-for graph over ranks and process groups, a verdict, and one sentence.

    calls of each rank ─waits─► who waits for whom ─verdict─► missing | cycle | mismatch | late, ranks ─words─► a sentence

Standard library only: the launcher uses it while the ranks run, the command line on dumps that they left.
"""

from pptrace.hang_diagnosis.calls import Call, CallState, Group, Presence, RankCalls
from pptrace.hang_diagnosis.verdict import Cause, Diagnosis, Hang, Verdict, diagnose
from pptrace.hang_diagnosis.waits import Edge

__all__ = [
    "Call",
    "CallState",
    "Cause",
    "Diagnosis",
    "Edge",
    "Group",
    "Hang",
    "Presence",
    "RankCalls",
    "Verdict",
    "diagnose",
]
