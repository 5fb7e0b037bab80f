"""Changes of a run, from the texts and numbers of a form or of an address."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlencode

from dashboards.fields import values_of
from pptrace.api.wishes import FORM, Wishes

FIELDS = tuple(FORM)
"""Names of the fields of a form."""
ASSUMED = tuple(name for name, option in FORM.items() if not option.is_change)
"""Fields that change nothing of the run: what its trace does not say."""


def wishes_of(form: Mapping[str, object]) -> Wishes:
    """The wishes of a form; fields that are missing or empty stay as they are in the run.

    Raises:
        UsageError: a field is no number, or no layers of stages.
    """
    return Wishes(**values_of(FORM, form))


def address_of(form: Mapping[str, object]) -> str:
    """The fields of a form that are not empty as the query of an address."""
    return urlencode([(name, str(value)) for name in FIELDS if (value := form.get(name)) not in (None, "")])
