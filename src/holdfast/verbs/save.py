"""``holdfast.save``: capture on every rank, agree, write on every rank, commit."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from holdfast.background.futures import warn_of_unseen_failures
from holdfast.background.lanes import wait_for_conflicting_saves
from holdfast.background.queues import Claim
from holdfast.coordination.meeting import meeting, own_place
from holdfast.garbage import no_garbage_collection
from holdfast.patterns import Pattern, Patterns
from holdfast.phases import Phases
from holdfast.save_report import SaveReport
from holdfast.stores.places import in_messages, store_at
from holdfast.stores.store import Store
from holdfast.verbs.capturing import Capture, Captured
from holdfast.verbs.save_options import SaveOptions
from holdfast.verbs.save_run import SaveRun
from holdfast.watching import Call

if TYPE_CHECKING:
    import torch.distributed as dist

    from holdfast.coordination.collectives import Collectives


def save(
    state: Any,
    path: str | os.PathLike[str] | Store,
    *,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    cast: Mapping[Pattern, Any] | None = None,
    check_replicas: bool | Literal["warn"] = True,
    allow_pickle: bool = False,
    max_file_size: int | None = None,
    memory_budget: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> SaveReport:
    """Save a state to a folder. With a process group all its ranks call this together, each with its own part.

    The checkpoint appears at once and whole when everything is durable, or not at all.

    Args:
        state: any nesting of dicts, lists and tuples with tensors, numpy arrays, models, optimizers, other objects
            that have ``state_dict`` and ``load_state_dict``, and plain values. ``PerRank`` and ``RngState`` mark what
            every rank has its own of.
        path: a folder, a URL such as ``s3://bucket/name``, or a store. All ranks give the same.
        overwrite: replace a checkpoint that is there, in one step. Without it that is an error.
        metadata: anything that JSON can hold, to be found in the checkpoint by people and programs. That of the first
            rank counts.
        include: which keys to save; all by default. Patterns such as ``"model.*"``, regular expressions, functions.
        exclude: which of these not to save.
        cast: patterns and the dtype to store their floating point tensors as: ``{"model.*": torch.bfloat16}``.
        check_replicas: compare what several ranks hold before one copy is stored. ``"warn"`` stores the copy of the
            lowest rank where they differ, False takes all copies to be equal.
        allow_pickle: store values that the format has no place for as pickles. Loading them needs the same.
        max_file_size: bytes of data in one file at most. Larger tensors are cut.
        memory_budget: bytes that may be allocated beyond the state, apart from some 2 KB per tensor. 64 MiB by default,
            256 KiB at least.
        process_group: the ranks that save. All by default; this process alone if there is no process group.

    Example:
        >>> import tempfile, torch
        >>> import holdfast as hf
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> saved = hf.save({"model": torch.nn.Linear(4, 2), "step": 100}, path)
        >>> saved.tensor_count
        2
        >>> hf.open(path)["step"]
        100
    """
    make_options = functools.partial(
        SaveOptions.of,
        include=include,
        exclude=exclude,
        cast=cast,
        metadata=metadata,
        overwrite=overwrite,
        check_replicas=check_replicas,
        allow_pickle=allow_pickle,
        max_file_size=max_file_size,
        memory_budget=memory_budget,
    )
    place = in_messages(path)
    warn_of_unseen_failures()
    wait_for_conflicting_saves(Claim(place))
    call = f"holdfast.save to {place}, overwrite={overwrite!r}, check_replicas={check_replicas!r}"
    rank, world_size = own_place(process_group)
    with Call("save", place, rank=rank, world_size=world_size) as told, meeting(call, process_group) as ranks:
        return save_together(ranks, state, path, make_options, told)


def save_together(
    ranks: Collectives,
    state: Any,
    path: str | os.PathLike[str] | Store,
    make_options: Callable[[], SaveOptions],
    call: Call,
) -> SaveReport:
    """Save with ranks that are together already, and tell of it."""
    phases = Phases(call)

    def capture() -> tuple[SaveRun, Captured]:
        with phases.during("capture"), no_garbage_collection():
            options = make_options()
            run = SaveRun(store_at(path), ranks, options, phases)
            return run, Capture.of(options, ranks.rank, ranks.world_size).take(state)

    run, captured = ranks.all_gather_status("capture", capture)
    report = run.save(captured)
    call.nbytes, call.slowest_rank = report.bytes_written, report.slowest_rank
    return report
