"""``holdfast.save``: capture on every rank, agree, write on every rank, commit."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import xxhash

from holdfast.coordination.meeting import meeting
from holdfast.environment import stamp
from holdfast.errors import CheckpointException
from holdfast.formats.native.layout import ChunkToWrite
from holdfast.formats.native.names import new_generation
from holdfast.garbage import no_garbage_collection
from holdfast.notices import warn_caller
from holdfast.patterns import Choice, Pattern, Patterns, Selection
from holdfast.planning.agreement import Differing, agree, describe_differing, refuse_differing
from holdfast.planning.holdings import Holding
from holdfast.planning.merged_trees import fill_slots, merge_trees, refuse_shared_keys, renamed_tensors, tensor_keys
from holdfast.storage.native_files import (
    Before,
    Contents,
    WrittenFile,
    commit_checkpoint,
    is_committed,
    look_before,
    remove_unfinished,
    write_chunks,
)
from holdfast.stores.places import store_at
from holdfast.stores.store import Store
from holdfast.verbs.capturing import Capture, Captured, floating_dtype

if TYPE_CHECKING:
    import torch.distributed as dist

    from holdfast.coordination.collectives import Collectives

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SavedCheckpoint:
    """What a save did."""

    path: str
    generation: str
    tensors: int
    nbytes: int
    """Of all data files."""
    seconds: float

    def __str__(self) -> str:
        return f"saved {self.tensors} tensors, {self.nbytes:,} bytes, to {self.path} in {self.seconds:.2f} s"


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
) -> SavedCheckpoint:
    """Save a state to a folder. With a process group all its ranks call this together, each with its own part.

    The checkpoint appears at once and whole when everything is durable, or not at all.

    Args:
        state: any nesting of dicts, lists and tuples with tensors, numpy arrays, models, optimizers, other objects
            that have ``state_dict`` and ``load_state_dict``, and plain values. ``PerRank`` and ``RngState`` mark what
            every rank has its own of.
        path: a folder, ``memory://name``, or a store. All ranks give the same.
        overwrite: replace a checkpoint that is there, in one step. Without it that is an error.
        metadata: anything that JSON can hold, to be found in the checkpoint by people and programs.
        include: which keys to save; all by default. Patterns such as ``"model.*"``, regular expressions, functions.
        exclude: which of these not to save.
        cast: patterns and the dtype to store their floating point tensors as: ``{"model.*": torch.bfloat16}``.
        check_replicas: compare what several ranks hold before one copy is stored. ``"warn"`` stores the copy of the
            lowest rank where they differ, False takes all copies to be equal.
        allow_pickle: store values that the format has no place for as pickles. Loading them needs the same.
        max_file_size: bytes of data in one file at most. Larger tensors are cut.
        memory_budget: bytes that the save may take beyond the state.
        process_group: the ranks that save. All by default; this process alone if there is no process group.

    Example:
        >>> import tempfile, torch
        >>> import holdfast as hf
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> saved = hf.save({"model": torch.nn.Linear(4, 2), "step": 100}, path)
        >>> saved.tensors
        2
        >>> hf.open(path)["step"]
        100
    """
    started = time.perf_counter()
    call = f"holdfast.save to {_told(path)}, overwrite={overwrite!r}, check_replicas={check_replicas!r}"
    with meeting(call, process_group) as ranks:

        def prepare() -> tuple[_Save, Captured]:
            selection = Selection(include, exclude)
            run = _Save(
                store_at(path),
                ranks,
                _checked_metadata(metadata),
                is_selected=not selection.is_everything,
                overwrite=overwrite,
                check_replicas=_checked_replicas(check_replicas),
                max_file_size=_checked_bytes("max_file_size", max_file_size),
                memory_budget=_checked_bytes("memory_budget", memory_budget),
            )
            capture = Capture(
                rank=ranks.rank,
                several_ranks=ranks.world_size > 1,
                selection=selection,
                cast=_checked_cast(cast),
                allow_pickle=allow_pickle,
                compare_copies=bool(check_replicas),
            )
            return run, capture.take(state)

        with no_garbage_collection():
            run, captured = ranks.all_gather_status("capture", prepare)
            chunks = run.plan(captured)
        files = run.write(chunks, captured)
        run.commit(files)
        saved = run.result(time.perf_counter() - started)
    logger.info("%s", saved)
    return saved


class _Save:
    """One save. Its methods are the steps, in the order in which they happen."""

    def __init__(
        self,
        store: Store,
        ranks: Collectives,
        metadata: Any,
        *,
        is_selected: bool,
        overwrite: bool,
        check_replicas: bool | Literal["warn"],
        max_file_size: int | None,
        memory_budget: int | None,
    ) -> None:
        self.store = store
        self.ranks = ranks
        self.metadata = metadata
        self.is_selected = is_selected
        self.overwrite = overwrite
        self.check_replicas = check_replicas
        self.max_file_size = max_file_size
        self.memory_budget = memory_budget
        self.generation = ""
        self.before: Before | None = None
        self.contents: Contents | None = None
        self.summary: tuple[int, int] = (0, 0)

    def plan(self, captured: Captured) -> list[ChunkToWrite]:
        """Find out together what the checkpoint contains; returns what this rank writes of it."""
        proposal = _Proposal(self._first_with_the_same_tree(captured), captured.tree, captured.own, captured.holdings)
        if proposal.same_tree_as != self.ranks.rank:
            proposal = proposal._replace(tree=None)  # it need not be sent twice

        def decide(proposals: list[_Proposal]) -> list[tuple[str, Sequence[ChunkToWrite]]]:
            self.before = look_before(self.store, overwrite=self.overwrite)
            tree, differing = merge_trees([proposals[proposal.same_tree_as].tree for proposal in proposals])
            tree = _with_own(tree, [proposal.own for proposal in proposals])
            if self.is_selected and tree == {}:
                raise ValueError(
                    "include and exclude leave nothing of the state, so nothing was saved. Texts take wildcards "
                    '("model", "*.bias"); regular expressions have to match whole keys.'
                )
            holdings = [proposal.holdings for proposal in proposals]
            if differing:
                # Where not even the structure is the same, some rank's tensors have no place in the checkpoint.
                referred = set(tensor_keys(tree))
                holdings = [[holding for holding in part if holding.key in referred] for part in holdings]
            agreed = agree(holdings)
            self._treat_differences([*differing, *agreed.differing])
            if agreed.ties:
                tree = renamed_tensors(tree, agreed.ties)
            self.contents = Contents(agreed.tensors, tree, self.metadata, stamp(self.ranks.world_size))
            generation = new_generation()
            return [(generation, part) for part in agreed.chunks]

        self.generation, chunks = self.ranks.reduce_scatter("plan", lambda: proposal, decide)
        return list(chunks)

    def write(self, chunks: list[ChunkToWrite], captured: Captured) -> list[WrittenFile]:
        """Write this rank's part. If another rank fails, it is removed again."""
        written: list[WrittenFile] = []

        def write() -> None:
            written.extend(
                write_chunks(
                    self.store,
                    chunks,
                    captured.local,
                    generation=self.generation,
                    rank=self.ranks.rank,
                    max_file_size=self.max_file_size,
                    memory_budget=self.memory_budget,
                )
            )

        try:
            self.ranks.all_gather_status("write", write)
        except BaseException:
            remove_unfinished(self.store, [file.name for file in written])
            raise
        return written

    def commit(self, files: list[WrittenFile]) -> None:
        """The coordinator puts the record in place, which makes all files of all ranks a checkpoint."""

        def put_in_place(parts: list[list[WrittenFile]]) -> tuple[int, int]:
            assert self.before is not None
            assert self.contents is not None
            every = [file for part in parts for file in part]
            with no_garbage_collection():
                record = commit_checkpoint(self.store, self.before, every, self.contents, self.generation)
            return len(record.tensors), sum(file.nbytes for file in record.files)

        try:
            self.summary = self.ranks.all_reduce("commit", lambda: files, put_in_place)
        except BaseException as error:
            # Without the coordinator's word it may be about to commit, and then it needs our files.
            coordinator_is_done = self.ranks.is_coordinator or isinstance(error, CheckpointException)
            if coordinator_is_done and not is_committed(self.store, self.generation):
                remove_unfinished(self.store, [file.name for file in files])
            raise

    def result(self, seconds: float) -> SavedCheckpoint:
        """What was done."""
        tensors, nbytes = self.summary
        return SavedCheckpoint(self.store.location, self.generation, tensors, nbytes, seconds)

    def _first_with_the_same_tree(self, captured: Captured) -> int:
        """The lowest rank whose tree is the same as this rank's."""
        if self.ranks.world_size == 1:
            return 0
        digest = xxhash.xxh3_128_digest(json.dumps(captured.tree).encode())
        return self.ranks.all_gather_object(digest).index(digest)

    def _treat_differences(self, differing: list[Differing]) -> None:
        if self.check_replicas is True:
            refuse_differing(differing)
        elif self.check_replicas == "warn" and differing:
            warn_caller(describe_differing(differing, "The copies of the lowest ranks are saved, the others are lost."))


class _Proposal(NamedTuple):
    """What a rank would have in the checkpoint."""

    same_tree_as: int
    """The rank that sends the tree."""
    tree: Any
    own: Mapping[str, Any]
    holdings: list[Holding]


def _with_own(tree: Any, own: Sequence[Mapping[str, Any]]) -> Any:
    """The tree with the values that each rank has of its own."""
    names = {name for values in own for name in values}
    if names:
        tree = fill_slots(tree, {name: [values.get(name) for values in own] for name in names})
    if names or len(own) > 1:
        refuse_shared_keys(tree)
    return tree


def _told(path: Any) -> str:
    """The path for messages and for comparing ranks. What is wrong with it is told later, on all ranks."""
    try:
        return store_at(path).location
    except Exception:
        return repr(path)


def _checked_metadata(metadata: Mapping[str, Any] | None) -> Any:
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a dict, not {metadata!r}")
    try:
        _refuse_keys_that_change(metadata)
        return json.loads(json.dumps(dict(metadata or {}), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"metadata must be what JSON can hold: {error}. Put other values into the state.") from error


def _refuse_keys_that_change(metadata: Any) -> None:
    """JSON would make texts of other keys, and two of them could become the same."""
    if isinstance(metadata, dict):
        for key, value in metadata.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not a text")
            _refuse_keys_that_change(value)
    elif isinstance(metadata, (list, tuple)):
        for value in metadata:
            _refuse_keys_that_change(value)


def _checked_cast(cast: Mapping[Pattern, Any] | None) -> Choice:
    if cast is not None and not isinstance(cast, Mapping):
        raise TypeError(f"cast takes patterns with the dtype for each, such as {{'model.*': 'bfloat16'}}, not {cast!r}")
    return Choice({pattern: floating_dtype(wish) for pattern, wish in (cast or {}).items()})


def _checked_replicas(check: Any) -> bool | Literal["warn"]:
    if check is True or check is False or check == "warn":
        return check  # type: ignore[no-any-return]
    raise ValueError(f"check_replicas must be True, False or 'warn', not {check!r}")


def _checked_bytes(name: str, number: Any) -> int | None:
    if number is not None and (type(number) is not int or number < 1):
        raise ValueError(f"{name} must be a number of bytes, such as 2 << 30, not {number!r}")
    return number
