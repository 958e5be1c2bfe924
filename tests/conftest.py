from __future__ import annotations

import signal
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests.ranks import RankPool

FSDP2_LACKS = "'Stream' object has no attribute 'record_event'"

# How long an example takes says nothing on a machine that does other things too.
hypothesis.settings.register_profile("holdfast", deadline=None, max_examples=60)
hypothesis.settings.load_profile("holdfast")

# Whoever starts the tests in the background may have them ignore Ctrl-C, and so would all programs that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """FSDP2 of torch 2.6 computes on accelerators only: tests that train with it are skipped there, and say why."""
    try:
        yield
    except Exception as error:
        if FSDP2_LACKS in str(error) and not hasattr(torch.cpu.Stream, "record_event"):
            pytest.skip(f"FSDP2 of torch {torch.__version__} cannot compute on a CPU")
        raise


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(world_size).run(body, *args)` runs a module-level function on that many real processes."""
    pool = RankPool()
    yield pool
    pool.close()
