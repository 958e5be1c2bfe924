"""Finds the weights of a model in the state of a training."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast.errors import UnknownKeyError
from holdfast.formats.native.refs import TensorRef
from holdfast.formats.native.trees import hides_tensor
from holdfast.sources.source import Source
from holdfast.sources.stored_nodes import StoredNode

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
    """Whether a leaf is called like something that trains a model and is no part of it."""
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
