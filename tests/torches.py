"""What the installed torch has, for tests that run with every supported version."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
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


def copies(dtype: torch.dtype) -> bool:
    """Whether the installed torch can copy tensors of a dtype that it has."""
    try:
        torch.empty(2, dtype=dtype).clone()
    except NotImplementedError:
        return False
    return True


def since(module: Any, name: str) -> Any:
    """Skip a test if the installed torch lacks something that the test compares with."""
    return pytest.mark.skipif(not hasattr(module, name), reason=f"torch {torch.__version__} has no {name}")


def lacking(error: BaseException) -> str | None:
    """Why a test cannot be run with the installed torch, if the error comes from what an older torch lacks.

    Each line has its own proof that the installed torch lacks it, so that nothing is hidden with a newer one.
    """
    text = str(error)
    return next((reason for sign, reason, lacks in LACKING if sign in text and lacks()), None)


def _stock_save_lacks(name: str) -> bool:
    import torch.distributed.checkpoint as stock

    return name not in inspect.signature(stock.save).parameters


ALONE: dict[str, Any] = {} if _stock_save_lacks("no_dist") else {"no_dist": True}
"""For stock's save and load in a process without a process group: what older torches do then without being asked."""


def _stock_collectives_lack(name: str) -> bool:
    from torch.distributed.checkpoint.utils import _DistWrapper

    return not hasattr(_DistWrapper(None, False, 0), name)


def _stock_broadcasts_from_rank_0() -> bool:
    from torch.distributed.checkpoint.utils import _DistWrapper

    return "global_coordinator_rank" not in inspect.getsource(_DistWrapper.broadcast_object)


def _stock_planner_lacks(name: str) -> bool:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    return name not in inspect.signature(DefaultSavePlanner).parameters


def _stock_saver_lacks(name: str) -> bool:
    from torch.distributed.checkpoint import state_dict_saver

    return not hasattr(state_dict_saver, name)


def says(module: str, text: str) -> bool:
    """Whether a module of torch has code that raises this."""
    return text in inspect.getsource(importlib.import_module(module))


def fsdp2_splits_unevenly() -> bool:
    """Whether FSDP2 over tensor parallelism takes sizes that do not divide evenly. Since 2.8."""
    return not says("torch.distributed.fsdp._fully_shard._fsdp_param", "FSDP+TP sharding does not support uneven")


def _lacks(module: str, name: str) -> bool:
    return not hasattr(importlib.import_module(module), name)


def _is_missing(module: str) -> bool:
    return importlib.util.find_spec(module) is None


def _fsspec_takes_no_options() -> bool:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    return "kwargs" not in inspect.signature(FsspecReader).parameters


RANK_LOCAL = "stock is asked for a rank-local checkpoint"


LACKING: list[tuple[str, str, Callable[[], bool]]] = [
    (
        "'Stream' object has no attribute 'record_event'",
        "FSDP2 cannot compute on a CPU",
        lambda: not hasattr(torch.cpu.Stream, "record_event"),
    ),
    *(
        (
            f"got an unexpected keyword argument '{name}'",
            f"stock's save has no {name}",
            functools.partial(_stock_save_lacks, name),
        )
        for name in ("use_collectives", "no_dist")
    ),
    (
        RANK_LOCAL,
        "stock knows no rank-local checkpoints",
        functools.partial(_stock_save_lacks, "use_collectives"),
    ),
    (
        "got an unexpected keyword argument 'enable_plan_caching'",
        "stock's planner keeps no plans",
        functools.partial(_stock_planner_lacks, "enable_plan_caching"),
    ),
    (
        "has no attribute 'AsyncCheckpointerType'",
        "stock's async_save has no processes",
        functools.partial(_stock_saver_lacks, "AsyncCheckpointerType"),
    ),
    *(
        (
            f"'_DistWrapper' object has no attribute '{name}'",
            f"stock's _DistWrapper has no {name}",
            functools.partial(_stock_collectives_lack, name),
        )
        for name in ("global_coordinator_rank", "barrier")
    ),
    (
        "Global rank 0 is not part of group",
        "stock works only in groups that rank 0 is part of",
        _stock_broadcasts_from_rank_0,
    ),
    (
        "assert len(local_shards) > 0",
        "a DTensor has at least one local shard on each rank",
        functools.partial(says, "torch.distributed.tensor._shards_wrapper", "assert len(local_shards) > 0"),
    ),
    *(
        (
            f"module '{module}' has no attribute '{name}'",
            f"stock has no {name}",
            functools.partial(_lacks, module, name),
        )
        for module, name in (
            ("torch.distributed.checkpoint", "HuggingFaceStorageReader"),
            ("torch.distributed.checkpoint", "HuggingFaceStorageWriter"),
            ("torch.distributed.checkpoint", "QuantizedHuggingFaceStorageReader"),
            ("torch.distributed.checkpoint.utils", "_assert_same_keys"),
        )
    ),
    *(
        (
            f"{name}.__init__() got an unexpected keyword argument 'endpoint_url'",
            f"stock's {name} takes no options of fsspec",
            _fsspec_takes_no_options,
        )
        for name in ("FsspecReader", "FsspecWriter")
    ),
    *(
        (text, "torch splits only evenly in two ways at once", functools.partial(says, module, text))
        for module, text in (
            ("torch.distributed.fsdp._fully_shard._fsdp_param", "FSDP+TP sharding does not support uneven sharding"),
            ("torch.distributed.tensor.placement_types", "_StridedShard currently only allows even sharding"),
        )
    ),
    (
        "Cannot use ReduceOp.AVG with Gloo",
        "HSDP of FSDP2 cannot compute on a CPU",
        functools.partial(
            says,
            "torch.distributed.fsdp._fully_shard._fsdp_collectives",
            "op=ReduceOp.AVG if predivide_factor is None else ReduceOp.SUM",
        ),
    ),
    (
        "FSDP only supports 1D TP, not",
        "FSDP2 works only over one other kind of parallelism",
        functools.partial(says, "torch.distributed.fsdp._fully_shard._fsdp_param", "FSDP only supports 1D TP, not"),
    ),
    *(
        (
            text,
            "views of DTensors do not flatten sharded columns",
            lambda: not says("torch.distributed.tensor._ops._view_ops", "_StridedShard"),
        )
        for text in (
            "but only the leftmost dim of a Flatten can be sharded.",
            "assert (Replicate(),) == (_StridedShard(dim=0, sf=3),)",  # they gather them instead
        )
    ),
    (
        "Attempted to flatten multiple dimensions, with dimension 1 being sharded.",
        "views of DTensors do not flatten sharded columns",
        functools.partial(says, "torch.distributed.tensor._ops._view_ops", "Attempted to flatten multiple dimensions"),
    ),
    (
        "UnsupportedOperation: fileno",
        "stock writes only to files that it can fsync",
        lambda: not says("torch.distributed.checkpoint.filesystem", "UnsupportedOperation"),
    ),
    *(
        (f"No module named '{module}'", f"there is no {module}", functools.partial(_is_missing, module))
        for module in ("torch.distributed.checkpoint._extension", "torch.distributed.checkpoint.hf_storage")
    ),
    (
        "cannot import name 'DefaultStager' from 'torch.distributed.checkpoint.staging'",
        "stock has no DefaultStager",
        functools.partial(_lacks, "torch.distributed.checkpoint.staging", "DefaultStager"),
    ),
    (
        "has elements of type F4, which torch",
        "torch has no 4-bit floats",
        lambda: not has_dtype("float4_e2m1fn_x2"),
    ),
    (
        "module 'torch.optim' has no attribute 'Muon'",
        "torch has no Muon",
        lambda: not hasattr(torch.optim, "Muon"),
    ),
]
"""What the message of an error says, the reason for skipping, and whether it is so."""


def backends_in_use() -> list[Any]:
    """What carries the messages of all process groups."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    return [group._get_backend(device) for group in groups for device in group._device_types]


def clear_sharding_cache() -> None:
    """DTensor caches results by mesh, and meshes of two groups compare equal."""
    # Slow to import: the fork server has done so, and the test session need not.
    debug = importlib.import_module("torch.distributed.tensor.debug")
    both = ("_clear_python_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache")  # those that 2.10 has
    for names in (("_clear_sharding_prop_cache",), both):
        if all(hasattr(debug, name) for name in names):
            for name in names:
                getattr(debug, name)()
            return
    from torch.distributed.tensor import DTensor

    # Until 2.7 there is no function for it.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
