"""Carries out save plans as safetensors files in the layout of Hugging Face models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.futures import Future

from holdfast._base.threads import map_in_threads
from holdfast._dcp.consolidate import consolidate_safetensors_files
from holdfast._dcp.hf_files import PartFile, split_by_file, write_part_file
from holdfast._dcp.planner import SavePlanner
from holdfast._dcp.storage import WriteResult
from holdfast._dcp.writer import SerializationFormat, _FileSystemWriter, record_real_dtypes, refuse_incomplete
from holdfast._formats.dcp.metadata import Metadata, _StorageInfo
from holdfast._formats.dcp.names import new_generation
from holdfast._formats.dcp.plan import SavePlan, WriteItem, WriteItemType
from holdfast._formats.hf_folder.commit import Folder, Switch, make_index
from holdfast._formats.hf_folder.folder import Contents, read_files
from holdfast._formats.hf_folder.model_files import assign_files, refuse_unmapped, write_model_files
from holdfast._formats.hf_folder.names import (
    COMMIT_NAME,
    INDEX_NAME,
    SHARDED_FOLDER,
    SUFFIX,
    file_name,
    final_name,
    generation_of,
    is_data_file,
    temporary_name,
)
from holdfast._stores.filesystem import AnyPath
from holdfast.errors import InvalidPlanError, UnsupportedValueError

# Hugging Face files that a program writes and lists call by call, without ``save``.
#
# Such a program makes the plans itself. What it puts into ``storage_data`` says which file a tensor goes into, files
# have their names as soon as they are written, and ``finish`` is given whatever results there are, maybe of other
# processes.


INDEX_MAPPING, FILE_MAPPING, SHARD_INDEX = "fqn_to_index_mapping", "fqn_to_file_mapping", "shard_index"


@dataclass(frozen=True)
class GivenPlan:
    """What ``storage_data`` of a plan says: where each tensor goes, by number or by name, and which shard this is."""

    index_of: Mapping[str, Any] | None
    shard: int | None

    @classmethod
    def of(cls, storage_data: Any) -> GivenPlan:
        """Read it in the forms that versions of torch have: with names for its parts, or the mapping alone."""
        if not storage_data:
            return cls(None, None)
        if not isinstance(storage_data, Mapping):
            raise InvalidPlanError(
                f"storage_data of the plan is a {type(storage_data).__name__}; a dict with {INDEX_MAPPING} and "
                f"{SHARD_INDEX} is expected, or what prepare_global_plan of this writer returned.",
                problems=["storage_data"],
            )
        if not {INDEX_MAPPING, FILE_MAPPING, SHARD_INDEX} & set(storage_data):
            return cls(storage_data, None)
        return cls(storage_data.get(INDEX_MAPPING, storage_data.get(FILE_MAPPING)), storage_data.get(SHARD_INDEX))

    def files(self, items: Sequence[WriteItem]) -> dict[str, list[WriteItem]]:
        """Names of files, and what goes into each."""
        index_of = self.index_of
        if index_of is not None:
            refuse_unmapped((item.index.fqn for item in items), index_of)
        largest = max((place for place in (index_of or {}).values() if isinstance(place, int)), default=1)
        files: dict[str, list[WriteItem]] = {}
        for (number, repeat), group in split_by_file(items, index_of).items():
            place: Any = number  # or the name of a file, if the mapping gives names
            if repeat:
                raise InvalidPlanError(
                    f"'{group[0].index.fqn}' has several parts in one plan, and a safetensors file has one tensor of a "
                    "name. Write the parts with plans of their own, each with another shard_index.",
                    problems=[item.index.fqn for item in group],
                )
            files[file_name(place, largest, self.shard) if isinstance(place, int) else _with_suffix(place)] = group
        return files


def write_file(
    folder: Folder, name: str, items: Sequence[WriteItem], planner: SavePlanner, *, copy_ahead: int
) -> list[WriteResult]:
    """Write one file, which appears under its name when it is complete."""
    inside = name if folder.inner is None else f"{folder.inner}/{name}"
    temporary = temporary_name(inside, new_generation())
    try:
        part = PartFile(folder.at(temporary), name, items)
        # Other processes write files of the same checkpoint, and there is no id that all of them know.
        written = write_part_file(folder.fs, part, planner, None, copy_ahead=copy_ahead, sync=folder.sync)
        folder.fs.rename(folder.at(temporary), folder.at(inside))
    except BaseException:
        folder.remove([temporary])
        raise
    return [
        WriteResult(result.index, result.size_in_bytes, _StorageInfo(name, 0, result.size_in_bytes))
        for result in written
    ]


def write_index(folder: Folder, results: Iterable[WriteResult]) -> None:
    """List the files of ``results`` in an index, in place of an earlier one. The files are not looked at."""
    weight_map, total = {}, 0
    for result in results:
        weight_map[result.index.fqn] = result.storage_data.relative_path
        total += getattr(result.storage_data, "length", result.size_in_bytes)
    content = json.dumps(make_index(weight_map, total, None), indent=2).encode()
    temporary = temporary_name(INDEX_NAME, new_generation())
    try:
        folder.fs.mkdir(folder.path)
        with folder.fs.create_stream(folder.at(temporary), "wb") as stream:
            stream.write(content)
        folder.fs.rename(folder.at(temporary), folder.at(INDEX_NAME))
    except BaseException:
        folder.remove([temporary])
        raise
    folder.remove([COMMIT_NAME])  # of an interrupted save, whose files are replaced
    if folder.sync:
        folder.fs.sync_folder(folder.path)


def _with_suffix(name: Any) -> str:
    return str(name) if str(name).endswith(SUFFIX) else f"{name}{SUFFIX}"


# Every rank writes its items into files of its own, under temporary names. The coordinator brings the parts together
# where whole model files were asked for, and then puts all files in place together (``hf_commit``). So several ranks
# never write to one file, and whatever dies on the way, the folder holds the old checkpoint or the new one.


_TICKET = "holdfast"
"""Where the ticket is in ``storage_data`` of plans. Plans without one were made by hand."""


@dataclass(frozen=True)
class _Ticket:
    """What the coordinator sends to each rank: of which save its files are, and how they are numbered."""

    generation: str
    save_id: str
    rank: int
    world_size: int


class HuggingFaceWriter(_FileSystemWriter):
    """Writes models as Hugging Face folders.

    By default the folder gets whole model files and an index, from any number of ranks. With ``save_distributed`` every
    rank leaves its parts as they are, without an index; with ``enable_consolidation`` as well, the parts go into the
    folder ``sharded`` and the model files are made out of them.
    """

    def __init__(
        self,
        path: AnyPath,
        fqn_to_index_mapping: Mapping[str, int] | None = None,
        thread_count: int = 1,
        save_distributed: bool = False,
        enable_consolidation: bool = False,
        thread_count_consolidation: int = 1,
    ) -> None:
        super().__init__(path, thread_count=thread_count)
        if thread_count_consolidation < 1:
            raise ValueError(f"thread_count_consolidation is {thread_count_consolidation}; it takes at least 1 thread")
        self.serialization_format: SerializationFormat = SerializationFormat.SAFETENSORS  # type: ignore[assignment]
        self.fqn_to_index_mapping = fqn_to_index_mapping
        self.save_distributed = save_distributed
        self.enable_consolidation = enable_consolidation
        self.thread_count_consolidation = thread_count_consolidation
        self._before: set[str] = set()

    @property
    def metadata_path(self) -> str:
        """The name of the index."""
        return INDEX_NAME

    @property
    def consolidated_output_path(self) -> AnyPath | None:
        """Where model files go that are made out of parts which are kept; it follows ``reset``."""
        return self.path if self.enable_consolidation else None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what cannot be stored before anything is written, and make the folder."""
        if not self.use_collectives:
            raise ValueError(
                f"{type(self).__name__} needs the ranks to plan together, because they write one set of files. Save "
                "with use_collectives=True."
            )
        self._refuse_what_cannot_be_stored(plan.items)
        folder = self._folder()
        self.fs.mkdir(self.path if folder.inner is None else folder.at(folder.inner))
        self._before = folder.names()
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Look for an earlier checkpoint, once for all ranks, and number the files of the ranks."""
        self._refuse_or_announce_overwriting()
        return [replace(plan, storage_data=self._storage_data(rank, len(plans))) for rank, plan in enumerate(plans)]

    def _storage_data(self, rank: int, world_size: int) -> dict[str, Any]:
        """What programs know from torch, and the ticket."""
        known: dict[str, Any] = {}
        if self.fqn_to_index_mapping is not None:
            known[INDEX_MAPPING] = self.fqn_to_index_mapping
        if self.save_distributed:
            known[SHARD_INDEX] = rank + 1
        return {**known, _TICKET: _Ticket(self._generation, self.save_id, rank, world_size)}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write all items; every file is durable when this returns. The first error of any thread is raised."""
        if not isinstance(plan.storage_data, Mapping) or _TICKET not in plan.storage_data:
            return self._write_by_hand(plan, planner)
        ticket: _Ticket = plan.storage_data[_TICKET]
        # Again, because a plan that was remembered from an earlier save comes along only now.
        self._refuse_what_cannot_be_stored(plan.items)
        files = self._part_files(plan.items, ticket)

        def write(file: PartFile) -> list[WriteResult]:
            return write_part_file(
                self.fs, file, planner, ticket.save_id, copy_ahead=self.per_thread_copy_ahead, sync=self.sync_files
            )

        try:
            written = map_in_threads(write, files, self.thread_count, "holdfast-write")
            if self.sync_files and files:
                folder = self._folder()
                self.fs.sync_folder(self.path if folder.inner is None else folder.at(folder.inner))
        except BaseException:
            self._folder().remove(file.name for file in files)
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for part in written for result in part])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit: check that everything was written, make model files if they are wanted, put all in place."""
        stored = [result for part in results for result in part]
        if any(generation_of(result.storage_data.relative_path) is None for result in stored):
            self._finish_by_hand(stored)
            return
        refuse_incomplete(replace(metadata, storage_data={result.index: result.storage_data for result in stored}))
        record_real_dtypes(metadata, stored)
        folder = self._folder()
        parts = sorted({result.storage_data.relative_path for result in stored})
        kept = {final_name(part): part for part in parts} if self.save_distributed else {}
        switch = Switch(self._generation, self.save_id, kept, None)
        folder.refuse_lost_files(replace(switch, files={final_name(part): part for part in parts}))
        if not self.save_distributed or self.enable_consolidation:
            switch = self._with_model_files(folder, switch, parts)
        # Another save into this folder removes what it finds useless. Either it does so before we look, or not at all.
        with self.fs.lock_folder(self.path):
            folder.refuse_lost_files(switch)
            folder.prepare(switch)
            folder.commit(switch, self._commit)
            self._last_committed_id = self.save_id
            folder.give_names(switch, folder.stale(self._before, switch))
        folder.remove_unfinished(self._generation)

    def _write_by_hand(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what a program has planned by itself. The files have their names when this returns."""
        self._refuse_values(plan.items)
        folder = self._folder()
        self.fs.mkdir(self.path if folder.inner is None else folder.at(folder.inner))
        files = GivenPlan.of(plan.storage_data).files(plan.items)

        def write(file: tuple[str, list[WriteItem]]) -> list[WriteResult]:
            return write_file(folder, *file, planner, copy_ahead=self.per_thread_copy_ahead)

        written = map_in_threads(write, files.items(), self.thread_count, "holdfast-write")
        if self.sync_files and files:
            self.fs.sync_folder(self.path if folder.inner is None else folder.at(folder.inner))
        future: Future[list[WriteResult]] = Future()
        future.set_result([result for part in written for result in part])
        return future

    def _finish_by_hand(self, results: list[WriteResult]) -> None:
        """List files that have their names already, or make model files out of the parts that are there by now."""
        folder = self._folder()
        if not self.save_distributed:
            write_index(folder, results)
        elif folder.inner is not None:
            consolidate_safetensors_files(
                folder.at(folder.inner), self.path, self.fqn_to_index_mapping, self.thread_count_consolidation
            )

    def discard_unfinished(self) -> None:
        """On the coordinator, after a failure on any rank: remove what was written for this save."""
        if not self.may_be_committed:
            self._folder().remove_unfinished(self._generation)

    def _with_model_files(self, folder: Folder, switch: Switch, parts: Sequence[str]) -> Switch:
        """The switch with whole model files, made out of parts, and with an index."""
        contents = read_files(folder, parts, self.thread_count_consolidation)
        outputs = assign_files(contents.keys, self.fqn_to_index_mapping)
        files = dict(switch.files)
        to_be_made = {}
        for name, keys in outputs.items():
            only_part = None if self.save_distributed else _only_part(keys, contents, folder, parts)
            files[name] = only_part or temporary_name(name, self._generation)
            if only_part is None:
                to_be_made[files[name]] = keys
        identified = replace(contents, save_id=self.save_id)
        write_model_files(folder, to_be_made, identified, threads=self.thread_count_consolidation)
        weight_map = {key: name for name, keys in outputs.items() for key in keys}
        total = sum(stored.nbytes for stored in contents.keys.values())
        return replace(switch, files=files, index=make_index(weight_map, total, self.save_id))

    def _folder(self) -> Folder:
        keeps_parts_apart = self.save_distributed and self.enable_consolidation
        return Folder(self.fs, self.path, sync=self.sync_files, inner=SHARDED_FOLDER if keeps_parts_apart else None)

    def _part_files(self, items: Iterable[WriteItem], ticket: _Ticket) -> list[PartFile]:
        folder = self._folder()
        largest = max((self.fqn_to_index_mapping or {}).values(), default=1)
        files = []
        for (index, repeat), group in split_by_file(items, self.fqn_to_index_mapping).items():
            # A file holds one part of a tensor; further ones of this rank take numbers that no rank has.
            final = file_name(index, largest, shard=repeat * ticket.world_size + ticket.rank + 1)
            name = temporary_name(final, ticket.generation)
            if folder.inner is not None:
                name = f"{folder.inner}/{name}"
            files.append(PartFile(folder.at(name), name, group))
        return files

    def _index_names(self) -> Iterable[str]:
        names = self._folder().names()
        yield from sorted(names & {INDEX_NAME, COMMIT_NAME})
        yield from sorted(filter(is_data_file, names))[:1]

    def _refuse_what_cannot_be_stored(self, items: Iterable[WriteItem]) -> None:
        items = list(items)
        self._refuse_values(items)
        if self.fqn_to_index_mapping is not None:
            refuse_unmapped((item.index.fqn for item in items), self.fqn_to_index_mapping)

    @staticmethod
    def _refuse_values(items: Iterable[WriteItem]) -> None:
        values = sorted({item.index.fqn for item in items if item.type == WriteItemType.BYTE_IO})
        if values:
            shown = ", ".join(values[:20]) + (f" and {len(values) - 20} more" if len(values) > 20 else "")
            raise UnsupportedValueError(
                f"safetensors files hold tensors only, and {len(values)} key(s) of the state are something else: "
                f"{shown}. Leave them out of the state, or save them with FileSystemWriter. Nothing was written.",
                key=values[0],
                keys=values,
            )


def _only_part(keys: Iterable[str], contents: Contents, folder: Folder, parts: Iterable[str]) -> str | None:
    """The one part that has all of a model file already, if there is one: then it needs just another name."""
    files = {chunk.file for key in keys for chunk in contents.keys[key].chunks}
    if len(files) != 1:
        return None
    return next(part for part in parts if str(folder.at(part)) in files)
