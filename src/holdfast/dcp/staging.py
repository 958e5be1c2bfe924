"""Stagers: how ``async_save`` gets a copy of the state that the training loop cannot change."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from holdfast._background import partners
from holdfast._background.arenas import ArenaPool, Memory
from holdfast._background.stagers import SnapshotTaker, common_pool, host_memory, own_pool
from holdfast._base.notices import warn_caller
from holdfast._formats.dcp.metadata import STATE_DICT_TYPE

__all__ = ["AsyncStager", "BlockingAsyncStager", "DefaultStager", "StagingOptions"]


@runtime_checkable
class AsyncStager(Protocol):
    """What ``async_save`` asks of a stager. A storage writer that has all of this is used as one.

    ``stage`` returns the copy, or a future of it if it is made in the background.
    """

    _synchronize_after_execute: bool = True

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether ``synchronize_staging`` is to be called before ``async_save`` returns."""
        return self._synchronize_after_execute

    def stage(self, state_dict: STATE_DICT_TYPE) -> Future[STATE_DICT_TYPE] | STATE_DICT_TYPE:
        """A copy of ``state_dict`` that nobody else changes."""
        raise NotImplementedError(f"{type(self).__name__} must implement stage method")

    def synchronize_staging(self) -> None:
        """Wait for staging to end. Old stagers have this; new ones return a future."""
        warn_caller("`synchronize_staging` is deprecated; return a future from `stage`", FutureWarning)

    def close(self) -> None:
        """Let go of what the stager holds."""


@dataclass
class StagingOptions:
    """How ``DefaultStager`` copies. What a machine cannot do is left out, with a warning.

    ``use_pinned_memory``: into memory that an accelerator can write to by itself.
    ``use_shared_memory``: into memory that a writer process sees without another copy.
    ``use_async_staging``: in a thread, so that ``async_save`` returns before the copy is complete.
    ``use_non_blocking_copy``: without waiting for each single copy from an accelerator, which is never done.
    """

    use_pinned_memory: bool = True
    use_shared_memory: bool = True
    use_async_staging: bool = True
    use_non_blocking_copy: bool = True


class DefaultStager(AsyncStager):
    """Copies into memory that is kept from save to save. Memory that a running save still reads is never reused.

    >>> stager = DefaultStager(StagingOptions(False, False, False, False))
    >>> state = {"weights": torch.zeros(2)}
    >>> staged = stager.stage(state)
    >>> _ = state["weights"].fill_(1)
    >>> staged["weights"]
    tensor([0., 0.])
    >>> stager.close()
    """

    _synchronize_after_execute: bool = False

    def __init__(self, config: StagingOptions = StagingOptions()) -> None:  # noqa: B008 - shown as stock shows it
        self._config = replace(config)
        memory = host_memory(
            pinned=self._config.use_pinned_memory,
            shared=self._config.use_shared_memory,
            non_blocking=self._config.use_non_blocking_copy,
        )
        self._taker = SnapshotTaker(own_pool(memory))

    def stage(self, state_dict: STATE_DICT_TYPE, **kwargs: Any) -> STATE_DICT_TYPE | Future[STATE_DICT_TYPE]:
        """A private copy, or with ``use_async_staging`` a future of it."""
        take = self._taker.take_later if self._config.use_async_staging else self._taker.take
        return take(state_dict)

    def synchronize_staging(self) -> None:
        """Wait for the copies that have begun."""
        self._taker.wait()

    def close(self) -> None:
        """Let go of the memory, when no copy is being made any more."""
        self._taker.close()


class BlockingAsyncStager(AsyncStager):
    """Copies before ``async_save`` returns. ``FileSystemWriter`` is one.

    With ``cache_staged_state_dict`` it keeps memory of its own for the next save, which is locked in place if there is
    an accelerator. Memory that a running save still reads is never used again. With ``type_check``, values other than
    tensors and plain ones are refused.
    """

    _synchronize_after_execute: bool = False

    def __init__(self, cache_staged_state_dict: bool = False, type_check: bool = False) -> None:
        self.cache_staged_state_dict = cache_staged_state_dict
        self.type_check = type_check
        self._taker: SnapshotTaker | None = None

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """A private copy, complete when this returns."""
        if self.type_check:
            _refuse_unusual_types(state_dict)
        if self._taker is None:
            self._taker = SnapshotTaker(self._pool())
        return self._taker.take(state_dict)

    def synchronize_staging(self) -> None:
        """There is never anything to wait for."""

    def close(self) -> None:
        """Let go of kept memory. The next ``stage`` takes new memory."""
        if self._taker is not None:
            self._taker.close()
        self._taker = None

    def _pool(self) -> ArenaPool:
        if not self.cache_staged_state_dict:
            return common_pool(Memory.PAGEABLE)
        return own_pool(Memory.PINNED if torch.accelerator.is_available() else Memory.PAGEABLE)

    def __getstate__(self) -> dict[str, Any]:
        # A writer travels to a writer process, and its kept memory does not.
        return {**self.__dict__, "_taker": None}


class _ReplicationStager(AsyncStager):
    """Exchanges states with a partner, half of the ranks away: each rank stages, and keeps as a file, its partner's.

    The file is ``rank_<this>_replica_partner_<partner>.pt`` in ``storage_dir``, and ``torch.load`` reads it. There must
    be an even number of ranks. States of local tensors and values only: a part of a distributed tensor is refused,
    since it would be taken for this rank's part.

    Args:
        pg: the ranks that take part.
        timeout: how long to wait for the partner.
        device: where the group's backend wants tensors.
        storage_dir: where to keep the partner's state. A new folder by default.
    """

    _synchronize_after_execute: bool = False

    def __init__(
        self,
        pg: dist.ProcessGroup,
        timeout: timedelta = timedelta(minutes=30),
        device: torch.device = torch.device("cpu"),  # noqa: B008
        storage_dir: str | None = None,
    ) -> None:
        self._pg = pg
        self._timeout = timeout
        self._device = device
        self._storage_dir = tempfile.mkdtemp(prefix="holdfast-replicas-") if storage_dir is None else storage_dir
        os.makedirs(self._storage_dir, exist_ok=True)

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """The partner's state, which is durable on this rank's disk by then; without a group, the state itself."""
        if not dist.is_initialized():
            return state_dict
        rank = dist.get_rank(self._pg)
        partner = partners.partner_of(rank, dist.get_world_size(self._pg))
        theirs = partners.exchanged(partners.encoded(state_dict), partner, self._pg, self._timeout, self._device)
        partners.keep(theirs, self._get_persisted_path(rank, partner))
        return partners.decoded(theirs)

    def _get_persisted_path(self, current_rank: int, partner_rank: int) -> str:
        """Where this rank keeps a partner's state."""
        return os.path.join(self._storage_dir, f"rank_{current_rank}_replica_partner_{partner_rank}.pt")

    def synchronize_staging(self) -> None:
        """There is never anything to wait for."""

    def close(self) -> None:
        """There is nothing to let go of. The file stays."""


_USUAL_TYPES = (torch.Tensor, int, float, str, bytes, bool, type(None))


def _refuse_unusual_types(value: Any, path: str = "") -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_unusual_types(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            _refuse_unusual_types(item, f"{path}.{position}")
    elif not isinstance(value, _USUAL_TYPES):
        raise ValueError(  # noqa: TRY004 - the class that stock raises
            f"Unexpected value type {type(value)} at '{path}': a stager with type_check takes tensors and plain values"
        )
