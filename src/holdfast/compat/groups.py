"""Process groups and the loggers of torch.distributed."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import c10d_logger, logging_handlers
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import Store


def default_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    return c10d._get_default_group()


def store_of(group: dist.ProcessGroup) -> Store:
    """The store by which the ranks of a group found each other."""
    return c10d._get_process_group_store(group)


def stores_in_use() -> Iterable[Store]:
    """The stores of all groups that are there."""
    return [store for _, store in c10d._world.pg_map.values()]


def device_types_of(group: dist.ProcessGroup) -> list[torch.device]:
    """The devices for which a group has a backend."""
    return list(group._device_types)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """What carries the messages of a group for tensors of a device."""
    return group._get_backend(device)


def device_of_messages(group: dist.ProcessGroup | None = None) -> torch.device:
    """The device on which the messages of a group have to be."""
    return torch.device(c10d._get_object_coll_device(group))


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a group waits for other ranks."""
    try:
        timeout: timedelta = backend_of(group, torch.device("cpu")).options._timeout
    except (RuntimeError, AttributeError):  # not every backend says
        timeout = c10d.default_pg_timeout
    return timeout


def set_backend_timeout(backend: Any, timeout: timedelta) -> None:
    """How long a backend waits for other ranks."""
    backend._set_default_timeout(timeout)


def log_handlers() -> dict[str, logging.Handler]:
    """The handlers that programs have installed for the loggers of torch.distributed."""
    return logging_handlers._log_handlers


def distributed_logger(name: str) -> logging.Logger:
    """The logger of torch.distributed of that name."""
    return c10d_logger._get_or_create_logger(name)


def describe_ranks(name: str, **about: Any) -> dict[str, Any]:
    """What records of torch.distributed say about the ranks of a call."""
    return c10d_logger._get_msg_dict(name, **about)
