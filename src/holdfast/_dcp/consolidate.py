"""Makes whole model files out of files that hold parts of tensors, with little memory however large the tensors are."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from holdfast._base.commits import Commit
from holdfast._formats.dcp.names import new_generation
from holdfast._formats.hf_folder.commit import Folder, Switch, make_index
from holdfast._formats.hf_folder.folder import Contents, read_contents, read_files
from holdfast._formats.hf_folder.model_files import assign_files, write_model_files
from holdfast._formats.hf_folder.names import SUFFIX, is_shard, temporary_name
from holdfast._ranks.shared_steps import Collectives
from holdfast._stores.local_filesystem import FileSystem
from holdfast.errors import CheckpointNotFoundError, RankDisagreementError


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
    with ranks.step("plan"):
        work = _Consolidation(input_dir, output_dir, fqn_to_index_mapping, num_threads, generation)
    views = ranks.all_gather("plan", work.fingerprint)
    with ranks.step("plan"):
        _refuse_different_views(work.source, views)
    try:
        with ranks.step("write"):
            work.write(work.share(ranks.rank, ranks.world_size))
        ranks.broadcast("write", work.commit)
    except BaseException:
        if ranks.is_coordinator:
            work.discard()
        raise


def _refuse_different_views(source: Folder, views: list[str]) -> None:
    if len(set(views)) > 1:
        raise RankDisagreementError(
            f"the ranks see different files, or different contents, in {source.path}. Wait until a running save has "
            "finished and all ranks see the same, and give all of them the same mapping; then try again.",
            views=dict(enumerate(views)),
        )


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
        self.committed = Commit()

    def fingerprint(self) -> str:
        """Equal on ranks that would write the same files from the same parts."""
        digests = sorted(
            {(chunk.file, chunk.header_digest) for key in self.contents.keys.values() for chunk in key.chunks}
        )
        return hashlib.sha256(repr((digests, sorted(self.outputs.items()))).encode()).hexdigest()[:16]

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
            self.target.commit(switch, self.committed)
            # Parts in this folder are not ours to remove: nobody asked for that.
            stale = [name for name in self.target.stale(self.before, switch, keep=keep) if not is_shard(name)]
            self.target.give_names(switch, stale)

    def discard(self) -> None:
        """After a failure: remove what was written, unless it counts already."""
        if not self.committed.may_have_happened:
            self.target.remove_unfinished(self.generation)


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
