"""``holdfast.export``: the weights of a model as a Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.budgets import checked_budget
from holdfast.checkpoint import Checkpoint, opened
from holdfast.converting.chosen_casts import Cast, Casts
from holdfast.converting.convert import carry_out, put_back_at
from holdfast.converting.model_part import find_model
from holdfast.converting.preparing import Wishes, prepare_renamed, rename_flat, unused
from holdfast.converting.report import ConversionReport
from holdfast.converting.safetensors_target import SafetensorsTarget
from holdfast.converting.shards import shard_size
from holdfast.errors import StateMismatchError, UnknownKeyError
from holdfast.formats.native.refs import TensorRef
from holdfast.patterns import Patterns, Selection
from holdfast.progress import OnProgress
from holdfast.renames import Rename, Renaming
from holdfast.sources.format_names import is_of_a_checkpoint
from holdfast.stores.store import Store
from holdfast.words import some_of

_MOST_SHOWN = 10


def export(
    source: str | os.PathLike[str] | Store | Checkpoint,
    destination: str | os.PathLike[str],
    *,
    part: str | None = None,
    max_shard_size: int | str | None = "5GB",
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Rename | None = None,
    cast: Cast | None = None,
    like: str | os.PathLike[str] | Store | Checkpoint | None = None,
    files: Sequence[str | os.PathLike[str]] = (),
    overwrite: bool = False,
    check: bool = True,
    memory_budget: int | None = None,
    allow_pickle: bool = False,
    on_progress: OnProgress | None = None,
) -> ConversionReport:
    """Write the weights of a model as a Hugging Face folder: safetensors files, and an index if there are several.

    Nothing but the checkpoint is needed: no model class, no process group, no GPU, and little memory. The result is
    read back and compared before it gets its name.

    Args:
        source: a checkpoint of any format.
        destination: the folder to make.
        part: where in the state the model is, such as ``"model"``. It is found by its name if nothing is given; the
            report tells what was taken, and what was not.
        max_shard_size: the most bytes of each file, as a number or such as ``"5GB"``.
        include: patterns of the model's names that are wanted (without ``part``); all are if nothing is given.
        exclude: patterns of names that are not wanted.
        rename: new names or prefixes by old ones, by regular expressions, or a function of the name.
        cast: a floating point type for all tensors of such types, or types by patterns of names.
        like: a model to agree with, such as the folder of the original: if names or shapes differ, nothing is written.
        files: other files to put beside the weights, such as ``config.json``.
        overwrite: replace a model that is there, in one step. Other files in the folder stay.
        check: read everything back and compare it before it gets its name.
        memory_budget: how many bytes of memory to use for buffers.
        allow_pickle: load values that were stored as pickles, which can run any code.
        on_progress: called with the bytes that are done and those there are in all.

    Example:
        >>> import os, tempfile, torch
        >>> import holdfast as hf
        >>> folder = tempfile.mkdtemp()
        >>> model = torch.nn.Linear(4, 2)
        >>> saved = hf.save({"model": model, "optimizer": torch.optim.AdamW(model.parameters())}, f"{folder}/step-1")
        >>> report = hf.export(f"{folder}/step-1", f"{folder}/hf", cast="bfloat16")
        >>> report.part, report.tensors, sorted(os.listdir(f"{folder}/hf"))
        ('model', 2, ['model.safetensors'])
    """
    wishes = Wishes(allow_pickle=allow_pickle, memory_budget=checked_budget(memory_budget))
    target = SafetensorsTarget(max_shard_size=shard_size(max_shard_size), files=_checked_files(files))
    put_back_at(destination)
    with opened(source, allow_pickle=allow_pickle) as checkpoint:
        stored = checkpoint.source
        model = find_model(stored, part)
        chosen, renaming = Selection(include, exclude), Renaming(rename)
        wanted = {name: found for name, found in model.names.items() if chosen(name)}
        if not wanted:
            raise UnknownKeyError(
                f"include and exclude leave nothing of the model in {stored.location}. They are about its own names, "
                f"such as {next(iter(model.names))!r}.",
                key=str(include),
                path=stored.location,
                near=list(model.names)[:3],
            )
        left_out = [*model.rest, *(key for name, (key, _) in model.names.items() if name not in wanted)]
        named = {new: found for new, (_, found) in rename_flat(wanted, renaming).items()}
        if like is not None:
            left_out += _agree(named, like, allow_pickle=allow_pickle)
        own_names = {key: name for name, (key, _) in wanted.items()}
        casts = Casts.of(cast, [(own_names[key], ref) for key, ref in named.values()])
        prepared = prepare_renamed(
            stored,
            target,
            {name: ref for name, (_, ref) in named.items()},
            wishes,
            casts,
            leaves=model.leaves,
            left_out=left_out,
            renamed={key: name for name, (key, _) in named.items() if name != key},
            unused=unused(renaming, casts),
        )
        return carry_out(
            prepared,
            target,
            destination,
            overwrite=overwrite,
            check=check,
            part=model.prefix,
            on_progress=on_progress,
        )


def _checked_files(files: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The files to copy, which must be there before anything is done."""
    paths = [Path(file) for file in files]
    names: dict[str, Path] = {}
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(2, "there is no such file to copy along", str(path))
        if is_of_a_checkpoint(path.name):
            raise ValueError(
                f"{path} cannot be put beside the weights: files of that name are a part of checkpoints. Leave it out."
            )
        other = names.setdefault(path.name, path)
        if other is not path:
            raise ValueError(f"{other} and {path} would both become {path.name} beside the weights. Give one of them.")
    return paths


def _agree(
    named: dict[str, tuple[str, TensorRef]],
    like: str | os.PathLike[str] | Store | Checkpoint,
    *,
    allow_pickle: bool,
) -> list[str]:
    """Raise unless names and shapes are those of another model. Returns second names of tied tensors that it lacks.

    Those are taken out of ``named``: models leave out such names, and tie the tensors again when they are loaded.
    """
    with opened(like, allow_pickle=allow_pickle) as model:
        part = find_model(model.source, None)
        expected = {name: ref.shape for name, (_, ref) in part.names.items()}
        location = model.source.location
    there = {ref.key for name, (_, ref) in named.items() if name in expected}
    tied = [name for name, (_, ref) in named.items() if name not in expected and ref.key in there]
    left_out = [named.pop(name)[0] for name in tied]
    missing = sorted(expected.keys() - named.keys())
    unexpected = sorted(named.keys() - expected.keys())
    shapes = {
        name: (ref.shape, expected[name])
        for name, (_, ref) in named.items()
        if name in expected and ref.shape != expected[name]
    }
    if missing or unexpected or shapes:
        raise _mismatch(location, missing, unexpected, shapes)
    return left_out


def _mismatch(
    location: str, missing: list[str], unexpected: list[str], shapes: Mapping[str, tuple[Any, Any]]
) -> StateMismatchError:
    lines = []
    if missing:
        lines.append(f"  missing: {some_of(missing, _MOST_SHOWN)}")
    if unexpected:
        lines.append(f"  unexpected: {some_of(unexpected, _MOST_SHOWN)}")
    if shapes:
        texts = [f"{name} ({list(found)}, not {list(wanted)})" for name, (found, wanted) in shapes.items()]
        lines.append(f"  of another shape: {some_of(texts, _MOST_SHOWN)}")
    return StateMismatchError(
        f"the model does not agree with {location}, so nothing was written:\n" + "\n".join(lines) + "\n"
        "Rename or exclude what differs, or choose another part of the state.",
        missing=missing,
        unexpected=unexpected,
        shapes=shapes,
        dtypes={},
        kinds={},
        uncovered={},
    )
