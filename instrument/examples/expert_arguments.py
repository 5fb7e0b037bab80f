"""The command line of the GPT example that concerns experts, and the options that it makes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from pptrace.errors import UsageError
from pptrace.sizes.expert_options import Dispatcher, DropOrder, ExpertOptions, Forced, Scoring, SecondChoice, Shared

Add = Callable[..., argparse.Action]
"""``add_argument`` of a group of arguments."""

_FIELD_OF: Mapping[str, str] = {
    "--top-k": "top_k",
    "--expert-every": "every",
    "--expert-width": "width",
    "--shared-expert-width": "shared_width",
    "--shared-expert": "shared",
    "--router": "scoring",
    "--router-scale": "scale",
    "--router-jitter": "jitter",
    "--router-groups": "num_groups",
    "--groups-per-token": "groups_per_token",
    "--second-choice": "second",
    "--aux-loss": "aux_loss",
    "--z-loss": "z_loss",
    "--bias-rate": "bias_rate",
    "--capacity-factor": "capacity_factor",
    "--drop-order": "drop_order",
    "--dispatcher": "dispatcher",
    "--force-routes": "forced",
    "--replay-routes": "routes",
    "--overlap-experts": "overlap",
    "--grouped-experts": "grouped",
}
"""Option → field of :class:`ExpertOptions`."""
_DEFAULTS = {field.name: field.default for field in fields(ExpertOptions) if field.default is not MISSING}


def add_experts(add: Add) -> None:
    """Add the arguments of experts, but for the sizes of their axes."""

    def option(name: str, text: str, **how: object) -> None:
        add(name, default=_DEFAULTS[_FIELD_OF[name]], help=text, **how)

    add(
        "--experts",
        type=_counts,
        metavar="E",
        help="experts in place of the MLP; E,E,…: of each layer that has some (pyramid); left out: none",
    )
    option("--top-k", "experts of each token", type=int, metavar="K")
    option("--expert-every", "every N-th layer has experts, the first included", type=int, metavar="N")
    option("--expert-width", "of each expert's inner layer; left out: 4 times the hidden size", type=int, metavar="N")
    option("--shared-expert-width", "of an MLP besides the experts; 0: none", type=int, metavar="N")
    option("--shared-expert", "how that MLP is joined with the experts", **_one_of(Shared))
    option("--router", "scores by which experts are chosen and weighted", **_one_of(Scoring))
    option("--router-scale", "factor of the experts' weights", type=float)
    option("--router-jitter", "the router sees numbers of tokens times 1 − EPS to 1 + EPS", type=float, metavar="EPS")
    option("--router-groups", "groups of experts; a token goes to some of them", type=int, metavar="G")
    option("--groups-per-token", "groups whose experts a token may go to", type=int, metavar="G")
    option("--second-choice", "of two experts, how the second is chosen", **_one_of(SecondChoice))
    option("--aux-loss", "coefficient of each sequence's load-balancing loss", type=float, metavar="ALPHA")
    option("--z-loss", "coefficient of the router's z loss", type=float, metavar="BETA")
    option(
        "--bias-rate",
        "change of the experts' bias after each step, which balances them without a loss (sigmoid); 0: no bias",
        type=float,
        metavar="U",
    )
    option(
        "--capacity-factor",
        "an expert takes F times its even share of a sequence's routes, others are dropped; left out: all",
        type=float,
        metavar="F",
    )
    option(
        "--drop-order",
        "routes that experts with a capacity take first: first choices in the order of tokens, or large weights",
        **_one_of(DropOrder),
    )
    option("--dispatcher", "how tokens come to experts on other ranks", **_one_of(Dispatcher))
    option(
        "--force-routes",
        "for measurements: routes that are given instead of chosen",
        **_one_of(Forced, Forced.REPLAYED),
    )
    option("--replay-routes", "for measurements: routes of a table (docs/training.md)", metavar="FILE.npy")
    option("--overlap-experts", "compute while tokens travel to experts and back", action="store_true")
    option(
        "--grouped-experts",
        "multiply the rows of all experts at once, where the GPU has a kernel for it (docs/training.md)",
        action="store_true",
    )


def read_experts(options: argparse.Namespace) -> ExpertOptions | None:
    """The options of the model's experts; None where it has none.

    Raises:
        UsageError: experts that cannot be, or an option of experts where there are none: it would change nothing.
    """
    if options.experts is None:
        for name, value in (("--ep", options.ep), ("--etp", options.etp)):
            if value != 1:
                _refuse(name)
        for name, field in _FIELD_OF.items():
            if _value_of(options, name) != _DEFAULTS[field]:
                _refuse(name)
        return None
    values: dict[str, Any] = {field: _value_of(options, name) for name, field in _FIELD_OF.items()}
    for field, kind in _KINDS.items():
        values[field] = kind(values[field])
    if values["routes"] is not None:
        if values["forced"] is not Forced.NONE:
            raise UsageError("--replay-routes gives the routes that --force-routes gives; leave one of them out")
        values["forced"] = Forced.REPLAYED
    if values["capacity_factor"] is None and values["drop_order"] is not _DEFAULTS["drop_order"]:
        raise UsageError(
            "--drop-order is for experts with a capacity, which drop routes; give them a --capacity-factor, or leave it out"
        )
    pyramid = options.experts if len(options.experts) > 1 else ()
    return ExpertOptions(max(options.experts), pyramid=pyramid, **values)


_KINDS = {
    "shared": Shared,
    "scoring": Scoring,
    "second": SecondChoice,
    "drop_order": DropOrder,
    "dispatcher": Dispatcher,
    "forced": Forced,
}


def _one_of(
    kind: type[Shared | Scoring | SecondChoice | DropOrder | Dispatcher | Forced], *but: str
) -> dict[str, object]:
    return {"choices": [each.value for each in kind if each not in but]}


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--experts is {text!r}; expected a number, or one for each layer that has some, such as 4,8"
        ) from None


def _value_of(options: argparse.Namespace, name: str) -> object:
    return getattr(options, name.removeprefix("--").replace("-", "_"))


def _refuse(name: str) -> None:
    raise UsageError(f"{name} is for a model with experts; give it some with --experts, or leave {name} out")
