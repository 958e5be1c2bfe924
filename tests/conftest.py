from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(world_size).run(body, *args)` runs a module-level function on that many real processes."""
    pool = RankPool()
    yield pool
    pool.close()
