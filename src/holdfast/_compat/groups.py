"""Process groups and the loggers of torch.distributed."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, TCPStore
from torch.distributed import c10d_logger, logging_handlers
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store


def default_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    return c10d._get_default_group()


def store_of(group: dist.ProcessGroup) -> Store:
    """The store by which the ranks of a group found each other."""
    return c10d._get_process_group_store(group)


def connection_of_its_own(store: Store) -> Store:
    """Another connection to the same keys: while one waits for a key, nobody else can use it."""
    clone: Callable[[], Store] | None = getattr(store, "clone", None)  # not in torch's stubs
    if clone is not None:
        return clone()
    # Torch 2.6 can neither clone a store nor say which prefix it has. So the ranks agree on a prefix of their own, by
    # a key of the store that is there; whoever comes first gives it its value, and nobody waits.
    prefix = store.compare_set("holdfast/connection", "", uuid.uuid4().hex).decode()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return PrefixStore(prefix, _reopened(store))


def _reopened(store: Store) -> Store:
    if isinstance(store, TCPStore):
        options: dict[str, Any] = {"timeout": cast(Any, store).timeout, "wait_for_workers": False}
        return TCPStore(store.host, store.port, is_master=False, **options)
    if isinstance(store, FileStore):
        return FileStore(cast(Any, store).path)
    return store  # of this process alone, or of a kind that is not known


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


def log_handlers() -> dict[str, logging.Handler]:
    """The handlers that programs have installed for the loggers of torch.distributed."""
    return logging_handlers._log_handlers


def distributed_logger(name: str) -> logging.Logger:
    """The logger of torch.distributed of that name."""
    return c10d_logger._get_or_create_logger(name)


def describe_ranks(name: str, **about: Any) -> dict[str, Any]:
    """What records of torch.distributed say about the ranks of a call."""
    return c10d_logger._get_msg_dict(name, **about)
