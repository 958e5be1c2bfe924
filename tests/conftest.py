from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.properties import register_profiles
from tests.rank_pool import RankPool
from tests.torches import lacking

register_profiles()

# Whoever starts the tests in the background may have them ignore Ctrl-C, and so would all programs that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that run on live ranks, so that `make test-fast` can leave them out."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker("ranks")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip tests that need what the installed torch lacks, and say what it is."""
    try:
        yield
    except BaseException as error:  # which stock's CheckpointException is
        reason = lacking(error)
        if reason is not None:
            pytest.skip(f"torch {torch.__version__}: {reason}")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Iterator[Any]:
    """The same for what tests start from."""
    try:
        return (yield)
    except BaseException as error:  # which stock's CheckpointException is
        reason = lacking(error)
        if reason is not None:
            pytest.skip(f"torch {torch.__version__}: {reason}")
        raise


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(world_size).run(body, *args)` runs a module-level function on that many real processes."""
    pool = RankPool()
    yield pool
    pool.close()
