"""How many examples property tests try: all of them in `make test-long`, a third in `make test`.

`tests/conftest.py` registers both as profiles of hypothesis. A property with a number of its own takes it through
`examples`, so that the profile holds for it, too: `@settings(max_examples=examples(300))`.
"""

from __future__ import annotations

import hypothesis

FULL = 60
"""The examples of a property that states no number, in the profile "long"."""


def register_profiles() -> None:
    # How long an example takes says nothing on a machine that does other things too.
    hypothesis.settings.register_profile("long", deadline=None, max_examples=FULL)
    hypothesis.settings.register_profile("short", deadline=None, max_examples=FULL // 3)
    hypothesis.settings.load_profile("short")


def examples(full: int) -> int:
    """The share of ``full`` examples that the profile in use grants, but one at least."""
    return max(1, full * hypothesis.settings.default.max_examples // FULL)
