"""``holdfast.export``: the weights of a model as a Hugging Face folder."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from holdfast._base.arguments import Size, checked_budget, checked_size
from holdfast._base.patterns import Patterns, Rename, Renaming, Selection
from holdfast._base.texts import some_of
from holdfast._formats.format_names import is_of_a_checkpoint
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.trees import hides_tensor
from holdfast._formats.source import Source
from holdfast._load.checkpoint import Checkpoint, opened, source_of
from holdfast._load.stored_nodes import StoredNode
from holdfast._stores.store import Store
from holdfast._tools.converting.casts import Cast, Casts
from holdfast._tools.converting.convert import carry_out, put_back_at
from holdfast._tools.converting.preparing import ConversionOptions, prepare_renamed, rename_flat, unused
from holdfast._tools.converting.report import ConversionReport
from holdfast._tools.converting.safetensors_target import SafetensorsTarget
from holdfast._watching.progress import OnProgress
from holdfast.errors import StateMismatchError, UnknownKeyError

# Finds the weights of a model in the state of a training.


_NAMES = ("model", "module", "state_dict", "model_state_dict", "net", "network", "weights", "model_state")
"""What people call the model in a state, the likeliest first."""
_OPTIMIZER = r"(?:.*_)?optim(?:izer)?s?(?:_.*|\d*)"
_NOT_THE_MODEL = re.compile(
    rf"{_OPTIMIZER}|opt_states?|(?:.*_)?schedulers?(?:_.*)?|(?:.*_)?rng(?:_.*)?|"
    r"(?:random|data_?loader|sampler|(?:grad_|amp_)?scaler)s?(?:_states?|_state_dicts?)?|"
    r"(?:global_)?steps?|epochs?|iterations?",
    re.IGNORECASE,
)
"""Whole words, since models have parts such as ``resampler`` too."""
_NOT_THE_MODEL_IN_FLAT_KEYS = re.compile(_OPTIMIZER, re.IGNORECASE)
"""Keys with dots are those of a state dict of a model, which may call its parts anything."""
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_forward_module.")


class ModelPart(NamedTuple):
    """The weights of a model."""

    prefix: str
    """Where they were, without the dot that follows; empty if that was the top."""
    names: dict[str, tuple[str, TensorRef]]
    """New names, without the prefix, with the old keys and what is stored there."""
    rest: list[str]
    """All other keys."""
    leaves: dict[str, Any]
    """Everything that the state holds, by its key there."""


def find_model(source: Source, part: str | None) -> ModelPart:
    """The tensors of ``part``, or of what is the model by all appearances, under the names that the model has for them.

    Names that wrappers put before all of them (``module.`` of DistributedDataParallel, say) are taken off.
    """
    leaves = {leaf.key: leaf for leaf in StoredNode.of(source.tree).leaves()}
    prefix = _find_prefix(source.tree) if part is None else part.removesuffix(".")
    chosen = {key: leaf for key, leaf in leaves.items() if _is_below(key, prefix)}
    if part is None and not prefix:
        chosen = {key: leaf for key, leaf in leaves.items() if not _is_of_training(leaf)}
    tensors = {key: leaf.value for key, leaf in chosen.items() if isinstance(leaf.value, TensorRef)}
    if not tensors:
        raise _no_weights(source, part, list(leaves))
    names = {key[len(prefix) + 1 :] if prefix else key: (key, ref) for key, ref in tensors.items()}
    rest = [key for key in leaves if key not in tensors]
    return ModelPart(prefix, _without_wrappers(names), rest, {key: leaf.value for key, leaf in leaves.items()})


def _find_prefix(tree: Any) -> str:
    """The way to the model: at the top of the state, or one step down."""
    if not isinstance(tree, Mapping):
        return ""
    found = _name_in(tree)
    if found is not None:
        return found
    if any(isinstance(value, TensorRef) for value in tree.values()):
        return ""  # these are the weights themselves
    inner = {name: _name_in(value) for name, value in tree.items() if isinstance(value, Mapping)}
    ways = [f"{name}.{found}" for name, found in inner.items() if found is not None]
    return ways[0] if len(ways) == 1 else ""


def _name_in(tree: Mapping[Any, Any]) -> str | None:
    return next((name for name in _NAMES if isinstance(tree.get(name), Mapping) and hides_tensor(tree[name])), None)


def _is_below(key: str, prefix: str) -> bool:
    return not prefix or key.startswith(f"{prefix}.")


def _is_of_training(leaf: StoredNode) -> bool:
    """Whether a leaf is called like something that trains a model and is not part of it."""
    first, dot, _ = str(leaf.path[0]).partition(".") if leaf.path else ("", "", "")
    return (_NOT_THE_MODEL_IN_FLAT_KEYS if dot else _NOT_THE_MODEL).fullmatch(first) is not None


def _without_wrappers(names: dict[str, tuple[str, TensorRef]]) -> dict[str, tuple[str, TensorRef]]:
    while True:
        wrapper = next((wrapper for wrapper in _WRAPPERS if all(name.startswith(wrapper) for name in names)), None)
        if wrapper is None:
            return names
        names = {name[len(wrapper) :]: found for name, found in names.items()}


def _no_weights(source: Source, part: str | None, keys: list[str]) -> UnknownKeyError:
    if part is None:
        text = f"there are no weights of a model in {source.location}. Say where they are with part='…'"
        return UnknownKeyError(text, key="", path=source.location, near=keys[:3])
    above = list(dict.fromkeys(key.rpartition(".")[0] for key in keys))
    near = difflib.get_close_matches(part, above[:5000], n=3) or above[:3]
    return UnknownKeyError(
        f"there are no tensors below {part!r} in {source.location}; did you mean {near[0] if near else ''!r}?",
        key=part,
        path=source.location,
        near=near,
    )


_MOST_SHOWN = 10


def export(
    source: str | os.PathLike[str] | Store | Checkpoint,
    destination: str | os.PathLike[str],
    *,
    part: str | None = None,
    max_file_size: Size | None = "5GB",
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    rename: Rename | None = None,
    cast: Cast | None = None,
    like: str | os.PathLike[str] | Store | Checkpoint | None = None,
    files: Sequence[str | os.PathLike[str]] = (),
    overwrite: bool = False,
    check: bool = True,
    memory_budget: Size | None = None,
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
            report lists what was taken, and what was not.
        max_file_size: the most bytes of each file, as a number or such as ``"5GB"``.
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
        >>> import holdfast
        >>> folder = tempfile.mkdtemp()
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> saved = holdfast.save({"model": model, "optimizer": optimizer}, f"{folder}/step-1")
        >>> report = holdfast.export(f"{folder}/step-1", f"{folder}/hf", cast="bfloat16")
        >>> report.part, report.tensors, sorted(os.listdir(f"{folder}/hf"))
        ('model', 2, ['model.safetensors'])
    """
    options = ConversionOptions(allow_pickle=allow_pickle, memory_budget=checked_budget(memory_budget))
    target = SafetensorsTarget(max_file_size=checked_size("max_file_size", max_file_size), files=_checked_files(files))
    put_back_at(destination)
    with opened(source, allow_pickle=allow_pickle) as checkpoint:
        stored = source_of(checkpoint)
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
            options,
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
        part = find_model(source_of(model), None)
        expected = {name: ref.shape for name, (_, ref) in part.names.items()}
        location = source_of(model).location
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
    )
