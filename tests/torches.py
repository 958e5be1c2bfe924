"""What the installed torch has, for tests that run with every supported version."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch


def dtypes(*names: str) -> list[torch.dtype]:
    """Those of these dtypes that the installed torch has."""
    return [getattr(torch, name) for name in names if has_dtype(name)]


def has_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


def stock_module(name: str) -> Any:
    """A module of stock DCP, or skip all tests of the file that asks if this torch has none of that name."""
    full_name = f"torch.distributed.checkpoint.{name}"
    return pytest.importorskip(full_name, reason=f"torch {torch.__version__} has no {full_name}")


def since(module: Any, name: str) -> Any:
    """Skip a test if the installed torch lacks something that the test compares with."""
    return pytest.mark.skipif(not hasattr(module, name), reason=f"torch {torch.__version__} has no {name}")


def clear_sharding_cache() -> None:
    """DTensor caches results by mesh, and meshes of two groups compare equal."""
    # Slow to import: the fork server has done so, and the test session need not.
    debug = importlib.import_module("torch.distributed.tensor.debug")
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()
        return
    from torch.distributed.tensor import DTensor

    # Until 2.7 there is no function for it.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
