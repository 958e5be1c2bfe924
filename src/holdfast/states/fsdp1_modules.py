"""Models of FSDP1, spoken of by the parameters that they were made of."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def contains_fsdp1(module: nn.Module) -> bool:
    """Whether parameters are in the flat ones of ``FullyShardedDataParallel``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in module.modules())


@contextmanager
def sharded_states(module: nn.Module) -> Iterator[None]:
    """Have FSDP1 speak of its parameters by their own names, each rank of its part."""
    if not contains_fsdp1(module):
        yield
        return
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardedOptimStateDictConfig, StateDictType

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # that FSDP1 is to go some day
        with FullyShardedDataParallel.state_dict_type(
            module, StateDictType.SHARDED_STATE_DICT, optim_state_dict_config=ShardedOptimStateDictConfig()
        ):
            yield
