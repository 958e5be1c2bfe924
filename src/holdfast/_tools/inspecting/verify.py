"""``holdfast.verify``: read a whole checkpoint and list everything that is damaged, instead of ending at the first."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Protocol

from holdfast._base.arguments import Size, checked_budget
from holdfast._base.patterns import Patterns, Selection
from holdfast._formats.native.names import RECORD
from holdfast._formats.native.record import repairs_in
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.source import Source
from holdfast._load.checkpoint import Checkpoint, no_such_keys, opened, source_of
from holdfast._load.stored_nodes import StoredNode
from holdfast._stores.places import in_messages, local_path
from holdfast._stores.store import Store
from holdfast._tools.inspecting.damage import Damage, VerifyReport
from holdfast._watching.progress import OnProgress, Progress
from holdfast.errors import (
    CheckpointNotFoundError,
    HoldfastError,
    MissingPackageError,
    NewerFormatError,
    NotACheckpointError,
    UnsupportedVersionError,
)

_COULD_NOT_LOOK = (
    CheckpointNotFoundError,
    MissingPackageError,
    NewerFormatError,
    NotACheckpointError,
    UnsupportedVersionError,
)


def verify(
    path: str | os.PathLike[str] | Store | Checkpoint,
    *,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    memory_budget: Size | None = None,
    allow_pickle: bool = False,
    on_progress: OnProgress | None = None,
) -> VerifyReport:
    """Read everything that is stored, compare it with all digests there are, and list all damage.

    Unlike loading, this goes on after the first damage. How much can be found depends on the format, and the report
    says so: Holdfast's own has a digest of every 64 KiB of every file, files of torch have CRCs of most of their
    content, and safetensors files have none, so that only their sizes and headers can be wrong. What cannot be vouched
    for, such as data from before a repair, is in ``report.doubts``.

    Args:
        path: a checkpoint of any format.
        include: only tensors and values of these keys, and the blocks that they share with others.
        exclude: without those of these.
        memory_budget: how many bytes buffers may take; 64 MiB by default.
        allow_pickle: load values that were stored as pickles, which can run any code.
        on_progress: called with the bytes that are done, and those there are in all.

    Returns:
        What was found. ``report.ok`` is the verdict.

    Example:
        >>> import os, tempfile, torch
        >>> import holdfast
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> saved = holdfast.save({"model": {"weight": torch.ones(500)}, "step": 100}, path)
        >>> holdfast.verify(path).ok
        True
        >>> [data] = [name for name in os.listdir(path) if name.startswith("data-")]
        >>> with open(f"{path}/{data}", "r+b") as file:
        ...     position = file.seek(-3, os.SEEK_END)
        ...     written = file.write(b"?")
        >>> report = holdfast.verify(path)
        >>> report.ok, report.damage[0].keys
        (False, ('model.weight',))
    """
    started = time.perf_counter()
    budget = checked_budget(memory_budget)
    selection = Selection(include, exclude)
    looking = _Looking(None if selection.is_everything else selection, budget, on_progress)
    with ExitStack() as stack:
        try:
            checkpoint = stack.enter_context(opened(path, allow_pickle=allow_pickle))
        except _COULD_NOT_LOOK:
            raise
        except HoldfastError as error:
            assert not isinstance(path, Checkpoint)  # it is open
            return _unopened(path, error, started)
        if not selection.is_everything and not looking.finds_any(checkpoint):
            raise no_such_keys(checkpoint, include, exclude)
        return looking.at(source_of(checkpoint), started)


class _Check(Protocol):
    """The look at a checkpoint of one format."""

    damage: list[Damage]
    doubts: list[str]
    """What is odd and need not be damage."""
    has_digests: bool
    """Whether what the format has of digests could be read."""

    def run(self, on_total: Callable[[int], Progress]) -> None:
        """Find all damage."""


@dataclass
class _Looking:
    chosen: Selection | None
    memory: int | None
    on_progress: OnProgress | None
    progress: Progress | None = None

    def finds_any(self, checkpoint: Checkpoint) -> bool:
        """Whether there is anything to look at. What a damaged checkpoint has is unknown."""
        try:
            return self.chosen is None or any(map(self.chosen, checkpoint))
        except HoldfastError:
            return True

    def at(self, source: Source, started: float) -> VerifyReport:
        """Look at an opened checkpoint."""
        unreadable: Damage | None = None
        try:
            names = _names_of(source.tree)
        except HoldfastError as error:
            names = {key: [key] for key in source.tensors}
            unreadable = Damage.from_error(error, _own_file(source, error))
        check = self._check(source, names)
        check.run(self._begin)
        damage = _settled(check.damage)
        if unreadable is not None and unreadable.file not in {found.file for found in damage}:
            damage.append(unreadable)
        checked, why = _digests_of(source, in_part=self.chosen is not None)
        if not check.has_digests:
            checked, why = (
                "none",
                "The digests are in a file that is damaged: of the others only the sizes were compared.",
            )
        own = {name for name, _ in source.files()}
        repairs = repairs_in(source.provenance)
        chosen = self.chosen
        return VerifyReport(
            path=source.location,
            format=source.format,
            identity=source.identity,
            tensors=sum(1 for key in source.tensors if chosen is None or _is_meant(names.get(key, [key]), chosen)),
            keys=sum(len(keys) for keys in names.values()),
            bytes_read=0 if self.progress is None else self.progress.done_bytes,
            seconds=time.perf_counter() - started,
            checked=checked,
            why=why,
            damage=tuple(damage),
            doubts=(*check.doubts, *map(str, repairs)),
            repairs=repairs,
            extra=tuple(sorted(_names_beside(source) - own)),
        )

    def _begin(self, total: int) -> Progress:
        self.progress = Progress(total, self.on_progress)
        return self.progress

    def _check(self, source: Source, names: Mapping[str, Sequence[str]]) -> _Check:
        chosen: Callable[[str], bool] | None = None
        if self.chosen is not None:
            selection = self.chosen
            chosen = lambda key: _is_meant(names.get(key, [key]), selection)  # noqa: E731
        if source.format == "native":
            from holdfast._tools.inspecting.native_damage import NativeCheck

            native: Any = source
            return NativeCheck(native, lambda key: names.get(key, [key]), chosen, self.memory)
        if source.format == "dcp":
            from holdfast._tools.inspecting.torch_damage import DcpCheck

            dcp: Any = source
            return DcpCheck(dcp, chosen, self.memory)
        if source.format == "torch":
            from holdfast._tools.inspecting.torch_damage import TorchFileCheck

            torch_file: Any = source
            return TorchFileCheck(torch_file, chosen, self.memory)
        from holdfast._tools.inspecting.safetensors_damage import SafetensorsCheck

        safetensors: Any = source
        return SafetensorsCheck(safetensors, chosen, self.memory)


def _is_meant(names: Sequence[str], chosen: Callable[[str], bool]) -> bool:
    return any(map(chosen, names))


def _names_of(tree: Any) -> dict[str, list[str]]:
    """All keys by the stored tensor that they name; a value has its own."""
    names: dict[str, list[str]] = {}
    for leaf in StoredNode.of(tree).leaves():
        names.setdefault(leaf.value.key if isinstance(leaf.value, TensorRef) else leaf.key, []).append(leaf.key)
    return names


def _settled(damage: Sequence[Damage]) -> list[Damage]:
    return sorted(damage, key=lambda found: (found.file, -1 if found.begin is None else found.begin))


def _own_file(source: Source, error: HoldfastError) -> str:
    """The file of a checkpoint that an error is about."""
    named = error.fields.get("file")
    if isinstance(named, str):
        return PurePath(named).name
    return RECORD if source.format == "native" else PurePath(source.location).name


def _digests_of(source: Source, *, in_part: bool) -> tuple[str, str]:
    """How much of a checkpoint has digests, and what that means."""
    computed = [repair.time for repair in repairs_in(source.provenance) if repair.has_new_digests]
    if source.format == "native" and computed:
        which = "Every block of the chosen tensors" if in_part else "Every byte that is there"
        return "some", (
            f"{which} was compared with digests that a repair has computed at {computed[-1]}, from the data as it was "
            "then. They say nothing about what happened before."
        )
    if source.format == "native" and in_part:
        return "all", "Every block of the chosen tensors was compared with the digest taken when it was saved."
    if source.format == "native":
        return "all", "Every byte that is there was compared with the digests that were taken when it was saved."
    if source.format == "dcp":
        return "some", (
            "Tensors and values were compared with their CRC-32 where the writer left one. The index (.metadata) has "
            "none: what it says was only checked for sense, so that a changed name of a key may not be noticed."
        )
    if source.format == "torch":
        entries: Any = getattr(source, "entries", list)()
        if not entries:
            return "none", "A file of torch from before 1.6 has no checksums; it was only read."
        which = "The chosen" if in_part else "All"
        if not all(entry.has_crc for entry in entries):
            return "some", "Some entries of the archive were written without a CRC-32; those were not compared."
        compared = f"{which} entries of the archive were compared with their CRC-32."
        return "some", f"{compared} What is between them has none."
    return "none", (
        "Safetensors files have no checksums: sizes and headers were checked, and that all can be read. A changed byte "
        "inside of a tensor cannot be noticed. holdfast convert makes a checkpoint that has digests."
    )


def _names_beside(source: Source) -> set[str]:
    """What is stored where the files of a checkpoint are. A checkpoint that is one file has nothing beside it."""
    store = getattr(source, "store", None)
    if isinstance(store, Store):
        return {listed.name for listed in store.list()}
    path = Path(source.location)
    return {found.name for found in path.iterdir() if found.is_file()} if path.is_dir() else set()


def _unopened(path: str | os.PathLike[str] | Store, error: HoldfastError, started: float) -> VerifyReport:
    """What can be said of a checkpoint that cannot be opened at all."""
    place = local_path(path)
    kind, damage = "unknown", list[Damage]()
    file = error.fields.get("file")
    own = PurePath(file).name if isinstance(file, str) else PurePath(in_messages(path)).name
    if place is not None and place.is_dir():
        names = set(os.listdir(place))
        if RECORD in names:
            kind = "native"
        elif any(name.endswith(".metadata") for name in names):
            kind, own = "dcp", own if own in names else ".metadata"
        else:
            from holdfast._tools.inspecting.safetensors_damage import damage_of_folder

            kind, damage = "safetensors", damage_of_folder(place)
    elif own.endswith(".safetensors"):
        kind = "safetensors"
    return VerifyReport(
        path=in_messages(path),
        format=kind,
        identity="",
        tensors=0,
        keys=0,
        bytes_read=0,
        seconds=time.perf_counter() - started,
        checked="none",
        why="It cannot be opened, so nothing behind what is damaged could be looked at.",
        damage=tuple(damage or [Damage.from_error(error, own)]),
    )
