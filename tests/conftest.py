from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

from tests.ranks import RankPool
from tests.torches import lacking

# How long an example takes says nothing on a machine that does other things too.
hypothesis.settings.register_profile("holdfast", deadline=None, max_examples=60)
hypothesis.settings.load_profile("holdfast")

# Whoever starts the tests in the background may have them ignore Ctrl-C, and so would all programs that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
