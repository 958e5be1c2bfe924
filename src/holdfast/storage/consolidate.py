"""Makes whole model files out of files that hold parts of tensors, with little memory however large the tensors are."""

from __future__ import annotations

import os
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holdfast.coordination.collectives import Collectives
from holdfast.errors import CheckpointNotFoundError, InvalidPlanError
from holdfast.formats.safetensors.torch_dtypes import to_safetensors
from holdfast.formats.safetensors.writer import SafetensorsWriter
from holdfast.planning.boxes import Box, overlaps, volume
from holdfast.storage.data_files import flush_to_disk
from holdfast.storage.hf_commit import Folder, Switch, make_index
from holdfast.storage.hf_folder import Contents, StoredKey, read_contents, read_files
from holdfast.storage.hf_names import SUFFIX, file_name, is_shard, temporary_name
from holdfast.storage.hf_notes import FileNotes, notes_of_whole_tensors
from holdfast.storage.layout import new_generation
from holdfast.storage.region_reads import BUFFER_BYTES, narrowed, read_region, readable_parts
from holdfast.stores.filesystem import FileSystemBase
from holdfast.stores.local import FileSystem

_MOST_OPEN = 32


def consolidate_safetensors_files(
    input_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    num_threads: int = 1,
) -> None:
    """Make whole model files and their index out of a folder of files with parts of tensors.

    Args:
        input_dir: where the parts are, as ``HuggingFaceStorageWriter(path, save_distributed=True)`` leaves them.
        output_dir: where the model files go, in place of any that are there. It may be ``input_dir``.
        fqn_to_index_mapping: the number of the file that each tensor goes into; all go into one file by default.
        num_threads: how many files are written at a time.

    Example:
        >>> import os, tempfile, torch
        >>> import holdfast.dcp as dcp
        >>> from holdfast.dcp.hf_storage import HuggingFaceStorageWriter
        >>> parts, model = tempfile.mkdtemp(), tempfile.mkdtemp()
        >>> writer = HuggingFaceStorageWriter(parts, save_distributed=True)
        >>> _ = dcp.save({"weight": torch.ones(4)}, storage_writer=writer, no_dist=True)
        >>> consolidate_safetensors_files(parts, model, {"weight": 1})
        >>> sorted(os.listdir(model))
        ['model-00001-of-00001.safetensors', 'model.safetensors.index.json']
    """
    work = _Consolidation(input_dir, output_dir, fqn_to_index_mapping, num_threads)
    try:
        work.write(work.outputs)
        work.commit()
    except BaseException:
        work.discard()
        raise


def consolidate_safetensors_files_on_every_rank(
    input_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    num_threads: int = 1,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """The same with the ranks of a group sharing the work, whole files each. Both folders must be on a shared disk.

    Returns on every rank when all files are there; an error on any rank is a ``CheckpointException`` on all.

    Example:
        >>> import os, tempfile, torch
        >>> import holdfast.dcp as dcp
        >>> from holdfast.dcp.hf_storage import HuggingFaceStorageWriter
        >>> path = tempfile.mkdtemp()
        >>> writer = HuggingFaceStorageWriter(path, save_distributed=True)
        >>> _ = dcp.save({"weight": torch.ones(4), "bias": torch.ones(2)}, storage_writer=writer, no_dist=True)
        >>> consolidate_safetensors_files_on_every_rank(path, path, {"weight": 1, "bias": 2})
        >>> sorted(os.listdir(path))[:2]
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    ranks = Collectives(process_group, dist.is_available() and dist.is_initialized(), 0)
    generation = ranks.broadcast("plan", new_generation)
    work = ranks.all_gather_status(
        "plan", lambda: _Consolidation(input_dir, output_dir, fqn_to_index_mapping, num_threads, generation)
    )
    try:
        ranks.all_gather_status("write", lambda: work.write(work.share(ranks.rank, ranks.world_size)))
        ranks.broadcast("write", work.commit)
    except BaseException:
        if ranks.is_coordinator:
            work.discard()
        raise


class _Consolidation:
    """Which tensors go into which files, and the steps that get them there."""

    def __init__(
        self,
        input_dir: str | os.PathLike[str],
        output_dir: str | os.PathLike[str],
        index_of: Mapping[str, int] | None,
        threads: int,
        generation: str | None = None,
    ) -> None:
        if threads < 1:
            raise ValueError(f"num_threads is {threads}; it takes at least 1 thread to write")
        fs = FileSystem()
        self.threads = threads
        self.generation = generation or new_generation()
        self.source = Folder(fs, Path(input_dir))
        self.inputs = _input_names(self.source)
        self.contents = _read_parts(self.source, self.inputs, threads)
        self.outputs = assign_files(self.contents.keys, index_of)
        self.target = Folder(fs, Path(output_dir))
        fs.mkdir(self.target.path)
        self.before = self.target.names()
        self.may_be_committed = False

    def share(self, rank: int, world_size: int) -> dict[str, list[str]]:
        """The files that one of several ranks writes: about as many bytes as the others."""
        load = [0] * world_size
        mine = {}
        sizes = {name: sum(self.contents.keys[key].nbytes for key in keys) for name, keys in self.outputs.items()}
        for name in sorted(self.outputs, key=lambda name: (-sizes[name], name)):
            lightest = load.index(min(load))
            load[lightest] += max(1, sizes[name])
            if lightest == rank:
                mine[name] = self.outputs[name]
        return mine

    def write(self, outputs: Mapping[str, list[str]]) -> None:
        """Write files under temporary names, durably."""
        write_model_files(
            self.target,
            {temporary_name(name, self.generation): keys for name, keys in outputs.items()},
            self.contents,
            threads=self.threads,
        )

    def commit(self) -> None:
        """Put all files and the index in place."""
        weight_map = {key: name for name, keys in self.outputs.items() for key in keys}
        total = sum(stored.nbytes for stored in self.contents.keys.values())
        save_id = self.contents.save_id
        switch = Switch(
            self.generation,
            save_id,
            {name: temporary_name(name, self.generation) for name in self.outputs},
            make_index(weight_map, total, save_id),
        )
        keep = self.inputs if os.path.realpath(self.source.path) == os.path.realpath(self.target.path) else []
        with self.target.fs.lock_folder(self.target.path):
            self.target.refuse_lost_files(switch)
            self.target.prepare(switch)
            self.may_be_committed = True
            self.target.commit(switch)
            # Parts in this folder are not ours to remove: nobody asked for that.
            stale = [name for name in self.target.stale(self.before, switch, keep=keep) if not is_shard(name)]
            self.target.give_names(switch, stale)

    def discard(self) -> None:
        """After a failure: remove what was written, unless it counts already."""
        if not self.may_be_committed:
            self.target.remove_unfinished(self.generation)


def assign_files(keys: Iterable[str], index_of: Mapping[str, int] | None) -> dict[str, list[str]]:
    """The names of model files, and the keys that go into each."""
    if index_of is None:
        listed = sorted(keys)
        return {file_name(1, 1): listed} if listed else {}
    refuse_unmapped(keys, index_of)
    largest = max(index_of.values(), default=1)
    files: dict[str, list[str]] = defaultdict(list)
    for key in sorted(keys):
        files[file_name(index_of[key], largest)].append(key)
    return dict(sorted(files.items()))


def refuse_unmapped(keys: Iterable[str], index_of: Mapping[str, int]) -> None:
    """Raise if there are keys of which the mapping does not say which file they go into."""
    unmapped = sorted({key for key in keys if key not in index_of})
    if unmapped:
        shown = ", ".join(unmapped[:10]) + (", …" if len(unmapped) > 10 else "")
        raise InvalidPlanError(
            f"fqn_to_index_mapping does not say which file {len(unmapped)} tensor(s) go into: {shown}. Add them, or "
            "give no mapping at all to have everything in one file.",
            problems=unmapped,
        )


def write_model_files(folder: Folder, files: Mapping[str, list[str]], contents: Contents, *, threads: int = 1) -> None:
    """Write files of whole tensors, given as name and keys; ``threads`` at a time. The first error is raised."""

    def write(name: str) -> None:
        keys = {key: contents.keys[key] for key in files[name]}
        _write_model_file(folder, name, keys, contents.save_id)

    if threads == 1:
        for name in files:
            write(name)
        return
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="holdfast-consolidate") as pool:
        list(pool.map(write, files))


def _write_model_file(folder: Folder, name: str, keys: Mapping[str, StoredKey], save_id: str | None) -> None:
    entries = [(key, *to_safetensors(key, stored.dtype, stored.size)) for key, stored in keys.items()]
    buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
    with folder.fs.create_stream(folder.at(name), "wb") as stream, _OpenFiles(folder.fs) as sources:
        writer = SafetensorsWriter(stream, entries, notes_of_whole_tensors(FileNotes(save_id)))
        for key in writer.header.tensors:
            writer.write(key, _blocks(key, keys[key], sources, buffer))
        writer.finish()
        if folder.sync:
            flush_to_disk(stream)


def _blocks(key: str, stored: StoredKey, sources: _OpenFiles, buffer: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a whole tensor, block by block, each brought together from all parts that reach into it."""
    itemsize = stored.dtype.itemsize
    whole = Box((0,) * len(stored.size), stored.size)
    # No gaps: every block is one run of bytes of the whole tensor. The bytes of an element are one more dimension, so
    # that no dtype is special.
    for block in readable_parts(stored.size, whole, itemsize, most=buffer.numel(), gap=0):
        count = volume(block.sizes) * itemsize
        filled = buffer[:count].view(*block.sizes, itemsize)
        for found in overlaps([block], stored.chunks):
            chunk = stored.chunks[found.source]
            place = narrowed(
                filled,
                (*(at - start for at, start in zip(found.start, block.offsets, strict=True)), 0),
                (*found.lengths, itemsize),
            )
            offsets = (*(at - start for at, start in zip(found.start, chunk.offsets, strict=True)), 0)
            read_region(
                sources[chunk.file],
                chunk.position,
                (*chunk.sizes, itemsize),
                torch.uint8,
                Box(offsets, (*found.lengths, itemsize)),
                place,
                source=chunk.file,
                key=key,
            )
        yield buffer[:count].numpy().data


class _OpenFiles:
    """Streams of files that are read, of which only the most recently used are open."""

    def __init__(self, fs: FileSystemBase) -> None:
        self._fs = fs
        self._open: OrderedDict[str, tuple[AbstractContextManager[Any], Any]] = OrderedDict()

    def __enter__(self) -> _OpenFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._open:
            self._close_oldest()

    def __getitem__(self, path: str) -> Any:
        if path not in self._open:
            if len(self._open) >= _MOST_OPEN:
                self._close_oldest()
            opening = self._fs.create_stream(path, "rb")
            self._open[path] = (opening, opening.__enter__())
        self._open.move_to_end(path)
        return self._open[path][1]

    def _close_oldest(self) -> None:
        _, (opening, _) = self._open.popitem(last=False)
        opening.__exit__(None, None, None)


def _read_parts(folder: Folder, names: list[str], threads: int) -> Contents:
    switch = folder.switch_under_way()
    if switch is not None and switch.index is None:  # a save was killed when its files were getting their names
        return read_contents(folder, threads)
    return read_files(folder, names, threads)


def _input_names(folder: Folder) -> list[str]:
    """The files with parts. Whole model files count only if there are no others: they may be of an earlier call."""
    names = sorted(name for name in folder.names() if name.endswith(SUFFIX))
    parts = [name for name in names if is_shard(name)]
    if not names:
        raise CheckpointNotFoundError(
            f"no {SUFFIX} files at {folder.path} to consolidate. Check the path for a typo; parts are often in a "
            "folder 'sharded'.",
            path=str(folder.path),
        )
    return parts or names
