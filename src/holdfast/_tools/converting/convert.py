"""``holdfast.convert``: a checkpoint of any format as one of another."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from holdfast import _settings as settings
from holdfast._base.arguments import Size, checked_budget, checked_size
from holdfast._base.patterns import Patterns, Rename
from holdfast._base.torch_needed import needing_torch
from holdfast._formats.source import Source
from holdfast._load.checkpoint import Checkpoint, opened, source_of
from holdfast._stores.places import local_path, store_at
from holdfast._stores.store import Store
from holdfast._tools.converting.casts import Cast
from holdfast._tools.converting.outgoing import Outgoing, OutTensor
from holdfast._tools.converting.placing import put_in_place, refuse_what_is_there
from holdfast._tools.converting.preparing import ConversionOptions, Prepared, prepare
from holdfast._tools.converting.proof import content_digest, prove
from holdfast._tools.converting.report import ConversionReport
from holdfast._tools.converting.target import Target, Written
from holdfast._tools.converting.work_folders import sweep, work_folder
from holdfast._watching.progress import OnProgress, Progress
from holdfast.errors import CheckpointException

DEFAULT_FILE_SIZE = "5GB"

_TARGETS = {
    "native": ("holdfast._tools.converting.native_target", "NativeTarget"),
    "dcp": ("holdfast._tools.converting.torch_targets", "DcpTarget"),
    "safetensors": ("holdfast._tools.converting.safetensors_target", "SafetensorsTarget"),
    "torch": ("holdfast._tools.converting.torch_targets", "TorchTarget"),
}
"""By format. They are imported when they are wanted: some need torch."""


def convert(
    source: str | os.PathLike[str] | Store | Checkpoint,
    destination: str | os.PathLike[str] | Store,
    *,
    to: str,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Rename | None = None,
    cast: Cast | None = None,
    max_file_size: Size | None = DEFAULT_FILE_SIZE,
    overwrite: bool = False,
    only_tensors: bool = False,
    check: bool = True,
    memory_budget: Size | None = None,
    allow_pickle: bool = False,
    on_progress: OnProgress | None = None,
) -> ConversionReport:
    """Write a checkpoint of any format, or a part of it, as one of another format.

    Tensors go through in pieces, so that it takes little memory. The result is made beside the destination, read back
    and compared, and only then gets its name: there is all of it, or nothing.

    Args:
        source: a checkpoint: a path, a URL, a store or an opened one.
        destination: where the new one goes. One that ends in ``.safetensors`` is a file, and so is one ``to`` torch;
            others are folders.
        to: ``"native"``, ``"dcp"``, ``"safetensors"`` or ``"torch"``.
        include: patterns of keys (as the source has them) that are wanted; all are if nothing is given.
        exclude: patterns of keys that are not wanted.
        rename: new keys or prefixes by old ones, by regular expressions, or a function of the key.
        cast: a floating point type for all tensors of such types, or types by patterns of keys.
        max_file_size: the most bytes of each file in a folder of safetensors files, such as ``"5GB"``.
        overwrite: replace a checkpoint that is there, in one step.
        only_tensors: leave out all values, which some formats cannot hold.
        check: read everything back and compare it before it gets its name.
        memory_budget: how many bytes of memory to use for buffers.
        allow_pickle: load and store values as pickles, which can run any code.
        on_progress: called with the bytes that are done and those there are in all.

    Example:
        >>> import tempfile, torch
        >>> import holdfast
        >>> folder = tempfile.mkdtemp()
        >>> torch.save({"model": {"w": torch.ones(2, 3)}, "step": 7}, f"{folder}/old.pt")
        >>> report = holdfast.convert(f"{folder}/old.pt", f"{folder}/new", to="native")
        >>> report.tensors, report.values, report.checked
        (1, 1, True)
        >>> holdfast.open(f"{folder}/new")["step"]
        7
    """
    target = target_for(to, destination, max_file_size=max_file_size)
    options = ConversionOptions(
        include, exclude, rename, cast, only_tensors, allow_pickle, checked_budget(memory_budget)
    )
    put_back_at(destination)
    with opened(source, allow_pickle=allow_pickle) as checkpoint:
        prepared = prepare(source_of(checkpoint), target, options)
        return carry_out(prepared, target, destination, overwrite=overwrite, check=check, on_progress=on_progress)


def target_for(to: str, destination: Any, *, max_file_size: Size | None = DEFAULT_FILE_SIZE) -> Target:
    """What writes a format to a destination."""
    if to not in _TARGETS:
        raise ValueError(f"there is no format {to!r} to convert to; there are {', '.join(_TARGETS)}")
    module, name = _TARGETS[to]
    is_file = not isinstance(destination, Store) and os.fsdecode(destination).endswith(".safetensors")
    is_folder_of_shards = to == "safetensors" and not is_file
    if max_file_size != DEFAULT_FILE_SIZE and not is_folder_of_shards:
        raise ValueError(
            f"max_file_size ({max_file_size}) is about the files of a safetensors folder, and {destination} ({to}) "
            "is not such a folder. Leave it out."
        )
    options: dict[str, Any] = {}
    if to == "safetensors":
        options = {"is_file": is_file, "max_file_size": checked_size("max_file_size", max_file_size)}
    with needing_torch(f"converting to {to!r}"):
        made: Target = getattr(importlib.import_module(module), name)(**options)
    return made


def put_back_at(destination: str | os.PathLike[str] | Store) -> None:
    """Clean up after killed conversions to a destination. What they took away may be the source of this one."""
    final = _local_destination(destination)
    if final is not None:
        sweep(final)


def _local_destination(destination: str | os.PathLike[str] | Store) -> Path | None:
    """Where a result goes on this machine. A link stays a link, and what it points to is replaced."""
    path = local_path(destination)
    return None if path is None else Path(os.path.realpath(path))


def carry_out(
    prepared: Prepared,
    target: Target,
    destination: str | os.PathLike[str] | Store,
    *,
    overwrite: bool,
    check: bool,
    part: str = "",
    on_progress: OnProgress | None = None,
) -> ConversionReport:
    """Write what was prepared, prove it, and put it in place."""
    started = time.monotonic()
    outgoing = prepared.outgoing
    target.refuse(outgoing)
    advance = Progress(_bytes_to_move(prepared, target, check=check), on_progress).advance
    outgoing.advance = advance
    final = _local_destination(destination)
    options: dict[str, Any] = {"overwrite": overwrite, "check": check, "advance": advance}
    with _proof_from_the_disk() if check else nullcontext():
        if final is None:
            written, not_compared = _write_to_store(prepared, target, destination, **options)
        else:
            written, not_compared = _write_locally(prepared, target, final, **options)
    return ConversionReport(
        source=outgoing.source.location,
        destination=str(final) if final is not None else store_at(destination).location,
        to=target.format,
        tensors=len(outgoing.names),
        values=len(outgoing.values),
        elements=sum(tensor.elements for tensor in _stored_tensors(outgoing, target)),
        elements_left_out=prepared.elements_left_out,
        bytes_read=outgoing.bytes_read,
        bytes_written=written.nbytes,
        files=list(written.files),
        digest=content_digest(outgoing),
        checked=check,
        seconds=time.monotonic() - started,
        part=part,
        left_out=prepared.left_out,
        renamed=prepared.renamed,
        cast=prepared.cast,
        unused=prepared.unused,
        not_compared=not_compared,
    )


@contextmanager
def _proof_from_the_disk() -> Iterator[None]:
    """Write past the page cache, unless somebody wants it otherwise: what is read back is to come from the disk."""
    if settings.current().page_cache != "auto":
        yield
        return
    with settings.override(page_cache="avoid"):
        yield


def _write_locally(
    prepared: Prepared, target: Target, final: Path, *, overwrite: bool, check: bool, advance: Callable[[int], None]
) -> tuple[Written, list[str]]:
    outgoing = prepared.outgoing
    refuse_what_is_there(final, overwrite=overwrite, is_file=target.is_file)
    not_compared: list[str] = []
    with work_folder(final) as work:
        outgoing.scratch = work.scratch
        written = _write(target, outgoing, work.new)
        _account_for_every_element(prepared)
        if check:
            not_compared = prove(outgoing, work.new, written.keys, advance)
        put_in_place(work, overwrite=overwrite)
    return written, not_compared


def _write(target: Target, outgoing: Outgoing, place: Path) -> Written:
    try:
        return target.write(outgoing, place)
    except CheckpointException as error:  # there are no other ranks, so that what it carries says it all
        raise next(iter(error.failures.values()))[0] from error


def _write_to_store(
    prepared: Prepared, target: Target, place: Any, *, overwrite: bool, check: bool, advance: Callable[[int], None]
) -> tuple[Written, list[str]]:
    from holdfast._tools.converting.native_target import NativeTarget

    store = store_at(place)
    if not isinstance(target, NativeTarget):
        raise ValueError(  # noqa: TRY004 - it is the place that does not suit
            f"{store.location} is not a folder of this machine, and only checkpoints of Holdfast's own format are "
            f"written to such places. Convert to 'native', or write {target.format} to a local path and copy it"
        )
    not_compared: list[str] = []

    def prove_all(result: Source) -> None:
        _account_for_every_element(prepared)
        if check:
            not_compared.extend(prove(prepared.outgoing, result, {}, advance))

    return target.write_to(store, prepared.outgoing, overwrite=overwrite, prove=prove_all), not_compared


def _bytes_to_move(prepared: Prepared, target: Target, *, check: bool) -> int:
    outgoing = prepared.outgoing
    return sum(tensor.nbytes for tensor in _stored_tensors(outgoing, target)) * (2 if check else 1)


def _stored_tensors(outgoing: Outgoing, target: Target) -> Iterable[OutTensor]:
    """Each as often as the format stores it."""
    return (outgoing.tensors if target.keeps_ties else outgoing.names).values()


def _account_for_every_element(prepared: Prepared) -> None:
    """Every element of the source must have gone out, or be known as left out. Anything else is a bug of ours."""
    prepared.outgoing.note_empty()
    missing = prepared.outgoing.tensors.keys() - prepared.outgoing.digests.keys()
    if missing:
        raise AssertionError(f"{len(missing)} tensor(s) were not written, such as {min(missing)!r}")
    written = sum(tensor.elements for tensor in prepared.outgoing.tensors.values())
    if written + prepared.elements_left_out != prepared.elements_in_source:
        raise AssertionError(
            f"of {prepared.elements_in_source} elements, {written} were written and {prepared.elements_left_out} "
            "left out"
        )
