"""Copies of a rank's state in the memory and on the disk of another rank.

Ranks are partners in pairs, half of the ranks apart, so that partners are on different hosts where ranks are numbered
host by host. A state is sent as the bytes of one ``torch.save`` file, and what arrives is kept as such a file.
"""

from __future__ import annotations

import io
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from holdfast._background.snapshots import take_snapshot
from holdfast._base.nested import flatten
from holdfast._layout.tensor_kinds import is_dtensor, is_sharded_tensor
from holdfast._stores.durable_files import written_atomically
from holdfast.errors import UnsupportedTensorError


def partner_of(rank: int, world_size: int) -> int:
    """The rank that keeps a copy of this one's state, and whose state this one keeps.

    >>> [partner_of(rank, 4) for rank in range(4)]
    [2, 3, 0, 1]
    """
    if world_size % 2:
        raise ValueError(
            f"{world_size} rank(s) cannot keep copies of each other in pairs. Use a group with an even number of ranks."
        )
    return (rank + world_size // 2) % world_size


def encoded(state: dict[str, Any]) -> bytes:
    """A state as the bytes of a file."""
    _refuse_parts(state)
    stream = io.BytesIO()
    torch.save(take_snapshot(state), stream)
    return stream.getvalue()


def decoded(content: bytes) -> dict[str, Any]:
    """The state in bytes that a rank of this very job has sent."""
    state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
    return state


def exchanged(
    content: bytes, partner: int, group: dist.ProcessGroup, timeout: timedelta, device: torch.device
) -> bytes:
    """Send bytes to the partner and return the partner's. ``device`` is where the group wants its tensors."""
    rank, peer = dist.get_rank(group), dist.get_global_rank(group, partner)
    mine = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)

    def send(tensor: torch.Tensor) -> None:
        _wait(dist.isend(tensor, peer, group), timeout)

    def receive(tensor: torch.Tensor) -> torch.Tensor:
        _wait(dist.irecv(tensor, peer, group), timeout)
        return tensor

    def send_all() -> None:
        send(torch.tensor([mine.numel()], device=device))
        send(mine)

    def receive_all() -> torch.Tensor:
        length = int(receive(torch.zeros(1, dtype=torch.int64, device=device)))
        return receive(torch.empty(length, dtype=torch.uint8, device=device))

    if rank < partner:  # one of the two must listen first
        send_all()
        return receive_all().cpu().numpy().tobytes()
    theirs = receive_all()
    send_all()
    return theirs.cpu().numpy().tobytes()


def keep(content: bytes, path: str) -> None:
    """Put a state's bytes at ``path``, in place of an earlier file: complete or not at all."""
    with written_atomically(path) as stream:
        stream.write(content)


def _wait(work: Any, timeout: timedelta) -> None:
    if work is None:
        raise RuntimeError("this rank is not in the process group of the stager")
    work.wait(timeout)


def _refuse_parts(state: dict[str, Any]) -> None:
    """Raise for tensors that mean something else on another rank: where a part belongs depends on who holds it."""
    for key, value in flatten(state).values.items():
        if is_dtensor(value) or is_sharded_tensor(value):
            kind = type(value).__name__
            raise UnsupportedTensorError(
                f"'{key}' is a {kind}. A rank's part of it would be taken for the partner's part there. Stage local "
                "tensors (to_local() of a DTensor), and keep with them which part they are.",
                key=key,
                kind=kind,
            )
