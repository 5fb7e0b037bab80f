"""The bytes of a layer with experts, predicted from its routes and counted in its marks, for every dispatcher.

    python -m tools.expert_bytes

Runs the layer forward and backward in four processes and prints the table of docs/training.md: sums over the ranks. Ends with
1 if a call of any rank has other bytes than predicted.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np

from pptrace.sizes.expert_options import Dispatcher, ExpertOptions, Forced
from pptrace.sizes.experts import ExpertCall, ExpertSizes
from tests.instrument.expert.cases.layers import HIDDEN, Seen, Tokens, compare
from tests.support.expert_calls import expert_calls
from tests.support.pool import Pool

WORLD, SEQUENCES = 4, 2
LAYER = Tokens(ExpertOptions(8, 2, width=6), num=16)


def settings() -> list[Tokens]:
    """Each dispatcher with the router's routes and with a hot expert, and padded buffers of a fixed capacity."""
    routed = [replace(LAYER, options=replace(LAYER.options, dispatcher=each)) for each in Dispatcher]
    hot = [replace(each, options=replace(each.options, forced=Forced.HOT)) for each in routed]
    fixed = replace(LAYER.options, dispatcher=Dispatcher.PADDED, capacity_factor=1.0)
    return [*routed, *hot, replace(LAYER, options=fixed)]


def both(tokens: Tokens, outcomes: list[Seen], etp: int) -> tuple[list[ExpertCall], list[ExpertCall]]:
    """The predicted calls of all ranks, and those in the marks."""
    options = tokens.options
    kept = np.array([seen.counts for seen in outcomes])
    slots, is_fixed = int(kept.max()), options.capacity_factor is not None
    if is_fixed:  # of each sequence: factor · k · T / E, at most its tokens
        slots = SEQUENCES * min(tokens.num, options.top_k * tokens.num // options.num)
    num_tokens = SEQUENCES * tokens.num
    sizes = ExpertSizes(WORLD // etp, etp, options.num, options.top_k, HIDDEN, num_tokens, 8, 8, slots, is_fixed)
    predicted = [sorted(expert_calls(options.dispatcher, sizes, kept, rank)) for rank in range(WORLD)]
    seen = [
        sorted(
            ExpertCall(mark.axis, mark.kind, mark.bytes, 0 if mark.uneven is None else mark.uneven.received_bytes)
            for mark in outcome.marks
        )
        for outcome in outcomes
    ]
    return [call for calls in predicted for call in calls], [call for calls in seen for call in calls]


def main() -> int:
    print("| dispatcher | routes | ep | etp | calls of a rank | bytes predicted | bytes in the marks |")
    print("|---|---|---|---|---|---|---|")
    all_equal = True
    with Pool(size=WORLD) as pool:
        for etp in (1, 2):
            outcomes = pool.run(compare, settings(), False, etp, False, world=WORLD)
            for index, tokens in enumerate(settings()):
                predicted, seen = both(tokens, [row[index] for row in outcomes], etp)
                all_equal &= predicted == seen
                routes = "hot" if tokens.options.forced is Forced.HOT else "the router's"
                routes = routes if tokens.options.capacity_factor is None else "within a capacity"
                words = [tokens.options.dispatcher, routes, WORLD // etp, etp, len(seen) // WORLD]
                words += [f"{sum(call.bytes for call in calls):,}" for calls in (predicted, seen)]
                print("|", " | ".join(map(str, words)), "|")
    print("equal call by call" if all_equal else "DIFFERENT", file=sys.stderr)
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())
