"""Times of messages between pipeline stages, of each step: for the simulated step of the timeline."""

from __future__ import annotations

import pandas as pd


def message_times(comms: pd.DataFrame) -> dict[int, int]:
    """The median time of the messages of each step whose readers waited for all of it, ns; none of steps without messages.

    A message that was under way before its reader asked for it is seen complete when the reader looks, however long ago it came:
    its recorded transfer may be as long as an op, and kept nobody. Where all were under way, what readers still waited counts.

    Args:
        comms: of schema COMMS.
    """
    is_received = (comms["axis"] == "pp") & (comms["kind"] == "recv") & (comms["match"] >= 0)
    names = ["step", "asked_ns", "transfer_start_ns", "transfer_end_ns"]
    received = comms.loc[is_received, names].reset_index(drop=True)
    begin, asked = received["transfer_start_ns"], received["asked_ns"]
    waited = (received["transfer_end_ns"] - begin.where(begin > asked, asked)).clip(lower=0)
    is_whole = begin > asked
    medians: dict[int, float] = {}
    for kept in (waited, waited[is_whole]):
        of_steps = kept.groupby(received["step"]).median()
        medians |= dict(zip(of_steps.index.tolist(), of_steps.tolist(), strict=True))
    return {step: round(median) for step, median in medians.items()}
