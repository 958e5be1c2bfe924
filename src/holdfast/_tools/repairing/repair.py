"""``holdfast.repair``: looks at a checkpoint, or at all those of a folder, and puts right what can be put right."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast._base.arguments import Size, checked_budget
from holdfast._formats.hf_folder.names import COMMIT_NAME
from holdfast._formats.native.names import RECORD, generation_of
from holdfast._formats.native.source import read_record
from holdfast._manager.run_file import RUN_FILE
from holdfast._stores.places import local_path, store_at
from holdfast._stores.roots import root_at
from holdfast._stores.store import Store
from holdfast._tools.listing.liveliness import why_perhaps_alive
from holdfast._tools.repairing import hugging_face, native
from holdfast._tools.repairing import leftovers as dcp
from holdfast._tools.repairing.leftovers import (
    LeftoverFiles,
    holds_leftovers_alone,
    leftovers_of_conversions,
    leftovers_of_hugging_face,
    leftovers_of_native,
)
from holdfast._tools.repairing.report import Planned, RepairReport
from holdfast._tools.repairing.unrecorded import Digesting
from holdfast._watching.progress import OnProgress
from holdfast.errors import HoldfastError, NotACheckpointError


def repair(
    path: str | os.PathLike[str] | Store,
    *,
    apply: bool = False,
    sweep: bool = False,
    generation: str | None = None,
    memory_budget: Size | None = None,
    on_progress: OnProgress | None = None,
) -> RepairReport:
    """Find out what is wrong with the files of a checkpoint or of a whole run, and with ``apply`` put it right.

    Without ``apply`` nothing is changed: the report says what would be. ``sweep`` removes files that killed saves and
    conversions left behind, and that nobody can be writing any more. ``generation`` chooses one of several saves whose
    data files are there and whose record is lost. What is replaced is kept beside it, as ``<name>.before-repair``.
    Where digests are computed again, buffers take ``memory_budget`` at most.

    The bytes of tensors are not compared with their digests here: ``holdfast.verify`` does that.

    Example:
        >>> import tempfile, torch
        >>> import holdfast
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> saved = holdfast.save({"w": torch.ones(3)}, path)
        >>> with open(f"{path}/data-{saved.identity}-0-0.safetensors", "r+b") as file:
        ...     length = file.seek(-1, 2)
        ...     cut_off = file.truncate()
        >>> [finding.outcome for finding in holdfast.repair(path).findings]
        ['can be repaired']
        >>> [finding.outcome for finding in holdfast.repair(path, apply=True).findings]
        ['repaired']
        >>> holdfast.open(path).read()["w"]
        tensor([1., 1., 1.])
    """
    place = path.location if isinstance(path, Store) else os.fsdecode(path)
    plan = _Plan(generation, Digesting(checked_budget(memory_budget), on_progress))
    if isinstance(path, Store):
        plan.look_at_one(path)
    else:
        plan.look_around(place)
    findings = [planned.carried_out(apply=apply) for planned in plan.problems]
    leftovers = [leftover.swept(apply=apply and sweep) for leftover in plan.leftovers]
    return RepairReport(place, tuple(findings), tuple(leftovers), apply, tuple(plan.checked))


class _Plan:
    """What was found so far."""

    def __init__(self, generation: str | None, digesting: Digesting) -> None:
        self._generation = generation
        self._digesting = digesting
        self.problems: list[Planned] = []
        self.leftovers: list[LeftoverFiles] = []
        self.checked: list[str] = []
        self._passed_over: list[str] = []
        """Places with files of a format that is only looked at in local folders."""

    def look_at_one(self, store: Store) -> None:
        """Look at the checkpoint in one place, where there has to be one."""
        if not self.look_at(store):
            raise self._nothing_found(store, f"there is no checkpoint at {store.location}. Check the path.")

    def look_around(self, place: str) -> None:
        """Look at a checkpoint, or at all that are directly in a folder."""
        path = local_path(place)
        if path is not None and path.is_file():
            self._look_at_file(path)
            return
        root = root_at(place)
        if path is not None:
            self.leftovers += leftovers_of_conversions(path)
            if not path.exists():
                raise NotACheckpointError(f"there is nothing at {path}. Check the path.", path=str(path), found=[])
        is_run = root.store.size(RUN_FILE) is not None
        if not is_run and self.look_at(root.store):
            return
        inner = [root.child(name) for name in sorted(root.children()) if not name.startswith(".")]
        looked = [self._look_inside(store) for store in inner]
        if not is_run and not any(looked) and not self.leftovers:
            raise self._nothing_found(
                root.store,
                f"there is no checkpoint at {place}, nor in a folder directly inside of it. Check the path.",
            )

    def _nothing_found(self, store: Store, message: str) -> NotACheckpointError:
        if self._passed_over:
            message = (
                f"{self._passed_over[0]} holds safetensors files, which repair only looks at in local folders. Copy "
                "them to one; holdfast verify checks them where they are."
            )
        found = [listed.name for listed in store.list()][:20]
        return NotACheckpointError(message, path=store.location, found=found)

    def _look_at_file(self, path: Path) -> None:
        """A file stands for the checkpoint whose index it is. Others have nothing that they could be rebuilt from."""
        if path.name == RECORD or path.name.endswith((".metadata", ".safetensors", ".safetensors.index.json")):
            self.look_at(store_at(path.parent))
            return
        raise NotACheckpointError(
            f"{path} is a single file, and there is nothing that it could be rebuilt from. holdfast verify says "
            "whether it is intact.",
            path=str(path),
            found=[path.name],
        )

    def _look_inside(self, store: Store) -> bool:
        """A folder among others. Without a record it is not a checkpoint to be made again: it may have been deleted."""
        if holds_leftovers_alone(store):
            if native.complete_saves(store, proven=True):
                self.problems.append(
                    Planned(
                        store.location,
                        "there is no record, though all data files of a save are there",
                        "if it was not deleted on purpose, repair this folder by itself",
                    )
                )
            else:
                self.leftovers += leftovers_of_native(store, None)
            return True
        return self.look_at(store)

    def look_at(self, store: Store) -> bool:
        """Look at the checkpoint in one folder. False if there is none, nor what is left of one."""
        names = {listed.name for listed in store.list()}
        path = local_path(store.location)
        if RECORD in names or any(generation_of(name) for name in names):
            self._native(store)
        elif any(name.endswith((".metadata", ".distcp")) for name in names):
            problems, leftovers = dcp.problems_of(store)
            self.problems += problems
            self.leftovers += leftovers
        elif any(".safetensors" in name for name in names):
            if path is None:
                self._passed_over.append(store.location)
                return False
            self.problems += hugging_face.problems_of(path)
            if COMMIT_NAME not in names:
                self.leftovers += leftovers_of_hugging_face(store)
        else:
            return False
        self.checked.append(store.location)
        return True

    def _native(self, store: Store) -> None:
        names = [listed.name for listed in store.list()]

        def may_rebuild() -> str | None:
            return why_perhaps_alive(store, [name for name in names if generation_of(name)])

        self.problems += native.problems_of(
            store, generation=self._generation, may_rebuild=may_rebuild, digesting=self._digesting
        )
        try:
            record = read_record(store)
        except HoldfastError:
            record = None
        if record is not None:
            self.leftovers += leftovers_of_native(store, record)
        elif RECORD not in names:
            self.leftovers += leftovers_of_native(store, None, but=native.complete_saves(store, proven=False))
