from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest

from tests.ranks import RankPool

# How long an example takes says nothing on a machine that does other things too.
hypothesis.settings.register_profile("holdfast", deadline=None)
hypothesis.settings.load_profile("holdfast")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(world_size).run(body, *args)` runs a module-level function on that many real processes."""
    pool = RankPool()
    yield pool
    pool.close()
