"""Changes from the texts and numbers of a form."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from dashboards.fields import words_of
from dashboards.pages.try_change import field, layout
from dashboards.store import Store
from dashboards.wishes import FIELDS, wishes_of
from pptrace.api.options import options_of
from pptrace.api.run import Run
from pptrace.api.wishes import FORM, Wishes
from pptrace.cli.whatif import command
from pptrace.errors import UsageError
from tests.support.programs import SAMPLES


def test_empty_fields_stay_as_they_are_in_the_run() -> None:
    assert not wishes_of({"schedule": "", "chunks": None, "split": ""})
    assert wishes_of({}) == Wishes()


def test_a_form_and_an_address_ask_for_the_same() -> None:
    form: dict[str, Any] = {
        "schedule": "zb-h1",
        "chunks": 2,
        "microbatch_size": 0.5,
        "split": "5, 5 3",
        "link_speed": "2",
    }
    wishes = wishes_of(form)
    assert wishes == Wishes(("zb-h1",), chunks=2, microbatch_size=0.5, split=(5, 5, 3), link_speed=2.0)
    assert wishes_of({name: str(value) for name, value in form.items()}) == wishes
    line = "--schedule zb-h1 --chunks 2 --microbatch-size 0.5 --split '5, 5 3' --link-speed 2"
    assert words_of(FORM, form) == line
    assert wishes_of({"repair_order": "yes"}) == Wishes(repair_order=True)
    assert words_of(FORM, {"repair_order": "yes"}) == "--repair-order"


@pytest.mark.parametrize(
    ("form", "line"),
    [
        ({"chunks": "two"}, "chunks is 'two'; expected a number"),
        ({"chunks": 1.5}, "chunks is 1.5; expected a whole number"),
        ({"microbatches": "inf"}, "microbatches is inf; expected a whole number"),
        ({"microbatches": 1e300}, "microbatches is 1e+300; expected a whole number"),
        ({"microbatches": "nan"}, "microbatches is nan; expected a whole number"),
        (
            {"split": "a,b"},
            "split a,b: expected layers of each stage such as 3,4,4,1, or Megatron-LM's layout such as Et*3|t*4|t*4|tL",
        ),
        ({"layers": "9999999,1"}, "layers has 10,000,000 layers; expected at most 2,000"),
    ],
)
def test_what_is_no_number_is_one_line(form: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        wishes_of(form)
    assert str(caught.value) == line


def test_shares_of_ops_are_assumed_and_change_nothing() -> None:
    wishes = wishes_of({"wgrad_share": "0.4", "fixed_share": 0.1})
    assert wishes == Wishes(wgrad_share=0.4, fixed_share=0.1)
    assert not wishes
    assert words_of(FORM, {"wgrad_share": "0.4", "fixed_share": 0.1}) == "--wgrad-share 0.4 --fixed-share 0.1"


def test_all_interfaces_have_the_options_of_the_one_list() -> None:
    """The terminal and Python have all, the form and the assistant those with a label."""
    options = options_of(Wishes)
    assert list(inspect.signature(Run.whatif).parameters) == ["self", *options]
    assert all(f"    {name}: " in (Run.whatif.__doc__ or "") for name in options)
    flags = {flag for parameter in command.params for flag in parameter.opts}
    assert flags >= {f"--{option.flag}" for option in options.values()}
    assert set(FIELDS) == {option.form_name for option in options.values() if option.label}
    ids = [field(name) for name in FIELDS]
    assert len(set(ids)) == len(FIELDS)
    page = str(layout(Store([SAMPLES / "1f1b_p2"]).get(), ""))
    assert not [id for id in ids if f"id='{id}'" not in page], "fields that the form does not draw"
