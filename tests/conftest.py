"""What all tests share."""

from __future__ import annotations

import os

from hypothesis import settings

# A busy machine is no failure. In continuous integration the same examples are drawn each time, so that a change is judged by
# what it changed; everywhere else they are new ones each time.
settings.register_profile("unhurried", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("unhurried")
