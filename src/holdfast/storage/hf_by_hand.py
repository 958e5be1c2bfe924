"""Hugging Face files that a program writes and lists call by call, without ``save``.

Such a program makes the plans itself. What it puts into ``storage_data`` says which file a tensor goes into, files have
their names as soon as they are written, and ``finish`` is given whatever results there are, maybe of other processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import InvalidPlanError
from holdfast.formats.dcp.storage_info import _StorageInfo
from holdfast.planning.plan import WriteItem
from holdfast.planning.planner import SavePlanner
from holdfast.storage.contract import WriteResult
from holdfast.storage.hf_commit import Folder, make_index
from holdfast.storage.hf_files import PartFile, split_by_file, write_part_file
from holdfast.storage.hf_model_files import refuse_unmapped
from holdfast.storage.hf_names import COMMIT_NAME, INDEX_NAME, SUFFIX, file_name, temporary_name
from holdfast.storage.layout import new_generation

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
