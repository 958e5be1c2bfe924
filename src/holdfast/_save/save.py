"""``holdfast.save``: capture on every rank, plan together, write on every rank, commit."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast._background.futures import warn_of_unseen_failures
from holdfast._background.queues import Claim, wait_for_conflicting_saves
from holdfast._base.commits import Commit
from holdfast._base.garbage import no_garbage_collection
from holdfast._formats.native.stored_files import StoredFile
from holdfast._formats.native.writing import (
    commit_checkpoint,
    remove_unfinished,
    write_chunks,
)
from holdfast._ranks.committing import commit_for_all
from holdfast._ranks.meeting import meeting, own_place
from holdfast._save.capture import Capture, Captured
from holdfast._save.local_bytes import bytes_of
from holdfast._save.options import CheckedOptions, SaveOptions, refuse_unknown_options, shows_save_options
from holdfast._save.planning import OwnPart, WritePlan, plan_save
from holdfast._save.report import SaveReport
from holdfast._stores.places import in_messages, store_at
from holdfast._stores.store import Store
from holdfast._watching.calls import Call, busiest, by_phase

if TYPE_CHECKING:
    import torch.distributed as dist
    from typing_extensions import Unpack

    from holdfast._ranks.shared_steps import Collectives


@shows_save_options
def save(
    state: Any,
    path: str | os.PathLike[str] | Store,
    *,
    overwrite: bool = False,
    process_group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
    **options: Unpack[SaveOptions],
) -> SaveReport:
    """Save a state to a folder. With a process group all its ranks call this together, each with its own part.

    The checkpoint appears at once and complete when everything is durable, or not at all.

    Args:
        state: any nesting of dicts, lists and tuples with tensors, numpy arrays, models, optimizers, other objects
            that have ``state_dict`` and ``load_state_dict``, and plain values. ``PerRank`` and ``RngState`` mark
            per-rank state.
        path: a folder, a URL such as ``s3://bucket/name``, or a store. All ranks give the same.
        overwrite: replace a checkpoint that is there, in one step. Without it that is an error.
        metadata: anything that JSON can hold, to be found in the checkpoint by people and programs. That of the first
            rank counts.
        include: which keys to save; all by default. Patterns such as ``"model.*"``, regular expressions, functions.
        exclude: which of these not to save.
        cast: patterns and the dtype to store their floating point tensors as: ``{"model.*": torch.bfloat16}``.
        replica_mismatch: what several ranks hold is compared before one copy is stored. If copies differ, that is an
            ``"error"``; ``"warn"`` stores the copy of the lowest rank, and ``"ignore"`` compares nothing.
        allow_pickle: store values that the format has no place for as pickles. Loading them needs the same.
        max_file_size: the most bytes of data in one file, as a number or such as ``"5GB"``. Larger tensors are cut.
        memory_budget: how much may be allocated beyond the state, apart from some 2 KB per tensor, such as
            ``"256MB"``: 64 MiB by default, 256 KiB at least.
        process_group: the ranks that save. All by default; this process alone if there is no process group.
        timeout: for how many seconds a rank may make no progress, or be waited for, before all others give up with a
            ``MissingRanksError`` that names it. By default as long as the process group waits, or as
            ``HOLDFAST_TIMEOUT`` says.

    Example:
        >>> import tempfile, torch
        >>> import holdfast
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> saved = holdfast.save({"model": torch.nn.Linear(4, 2), "step": 100}, path)
        >>> saved.tensor_count
        2
        >>> holdfast.open(path)["step"]
        100
    """
    refuse_unknown_options("holdfast.save()", options)
    make_options = functools.partial(CheckedOptions.of, options, overwrite=overwrite)
    place = in_messages(path)
    warn_of_unseen_failures()
    wait_for_conflicting_saves(Claim(place))
    on_mismatch = options.get("replica_mismatch", "error")
    call = f"holdfast.save to {place}, overwrite={overwrite!r}, replica_mismatch={on_mismatch!r}"
    rank, world_size = own_place(process_group)
    with (
        Call("save", place, rank=rank, world_size=world_size) as event,
        meeting(call, process_group, timeout=timeout, progress=event) as ranks,
    ):
        return save_together(ranks, state, path, make_options, event)


def save_together(
    ranks: Collectives,
    state: Any,
    path: str | os.PathLike[str] | Store,
    make_options: Callable[[], CheckedOptions],
    call: Call,
) -> SaveReport:
    """Save with ranks that are together already, and publish its events."""
    call.start_over()
    with ranks.step("capture"), call.phase("capture"), no_garbage_collection():
        options = make_options()
        run = SaveRun(store_at(path), ranks, options, call)
        captured = Capture.of(options, ranks.rank, ranks.global_ranks()).take(state)
    report = run.save(captured)
    call.nbytes, call.slowest_rank = report.bytes_written, report.slowest_rank
    return report


@dataclass(frozen=True)
class SaveRun:
    """One save. Its methods are the steps, in the order in which they happen."""

    store: Store
    ranks: Collectives
    options: CheckedOptions
    call: Call

    def save(self, captured: Captured) -> SaveReport:
        """All steps."""
        with self.call.phase("plan"), no_garbage_collection():
            plan = plan_save(self.store, self.ranks, self.options, captured)
        files = self.write(plan, captured)
        self.call.enter("commit")  # which the coordinator does, and the others wait for
        return self.commit(plan, files)

    def write(self, plan: WritePlan, captured: Captured) -> list[StoredFile]:
        """Write this rank's part. If another rank fails, it is removed again."""
        files: list[StoredFile] = []
        try:
            # The phase is inside of the step: it has not the time in which this rank waits for others.
            with self.ranks.step("write"), self.call.phase("write") as writing:
                files = write_chunks(
                    self.store,
                    plan.chunks,
                    bytes_of(captured.local, self.options.memory_budget, private=captured.is_private),
                    generation=plan.generation,
                    rank=self.ranks.rank,
                    max_file_size=self.options.max_file_size,
                    memory_budget=self.options.memory_budget,
                    writers=plan.writers,
                    advance=self.call.advance,
                )
                writing.nbytes = sum(file.nbytes for file in files)
        except BaseException:
            remove_unfinished(self.store, [file.name for file in files])
            raise
        return files

    def commit(self, plan: WritePlan, files: list[StoredFile]) -> SaveReport:
        """The coordinator puts the record in place, which makes all files of all ranks a checkpoint."""

        def put_in_place(parts: list[_Done], commit: Commit) -> SaveReport:
            assert plan.decision is not None
            every = [file for part in parts for file in part.files]
            timed = busiest([part.seconds for part in parts])
            seconds = by_phase([parts[rank].seconds for rank in timed])
            written: dict[str, Any] = {"phases": seconds}
            if len(timed) < len(parts):
                written["phase_ranks"] = timed
            contents = plan.decision.contents([part.own for part in parts])
            contents = replace(contents, written={**contents.written, **written})
            with self.call.phase("commit"), no_garbage_collection():
                record = commit_checkpoint(
                    self.store, plan.decision.existing, every, contents, plan.generation, commit=commit
                )
            return SaveReport(
                path=self.store.location,
                identity=plan.generation,
                tensor_count=len(record.tensors),
                bytes_written=sum(file.nbytes for file in record.files),
                seconds=max(part.elapsed for part in parts) + self.call.seconds["commit"],
                world_size=self.ranks.world_size,
                phases={**seconds, "commit": [self.call.seconds["commit"]]},
                ranks=timed,
            )

        return commit_for_all(
            self.ranks,
            "commit",
            lambda: _Done(files, self.call.seconds, self.call.elapsed(), plan.own),
            put_in_place,
            undo=lambda: remove_unfinished(self.store, [file.name for file in files]),
        )


class _Done(NamedTuple):
    """What a rank has written, how long it took, and what it has of its own."""

    files: list[StoredFile]
    seconds: Mapping[str, float]
    elapsed: float
    own: OwnPart
