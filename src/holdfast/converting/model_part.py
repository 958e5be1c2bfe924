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
_NOT_THE_MODEL = re.compile(
    r".*optim.*|.*sched.*|.*rng.*|.*random.*|.*dataloader.*|.*sampler.*|.*scaler|global_step|steps?|epochs?|iteration",
    re.IGNORECASE,
)
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")


class ModelPart(NamedTuple):
    """The weights of a model."""

    prefix: str
    """Where they were, without the dot that follows; empty if that was the top."""
    names: dict[str, tuple[str, TensorRef]]
    """New names, without the prefix, with the old keys and what is stored there."""
    rest: list[str]
    """All other keys."""


def find_model(source: Source, part: str | None) -> ModelPart:
    """The tensors of ``part``, or of what is the model by all appearances, under the names that the model has for them.

    Names that wrappers put before all of them (``module.`` of DistributedDataParallel, say) are taken off.
    """
    leaves = {leaf.key: leaf for leaf in StoredNode.of(source.tree).leaves()}
    prefix = _find_prefix(source.tree) if part is None else part.removesuffix(".")
    chosen = {key: leaf for key, leaf in leaves.items() if _is_below(key, prefix)}
    if part is None and not prefix:
        chosen = {key: leaf for key, leaf in leaves.items() if not _NOT_THE_MODEL.fullmatch(_first(leaf))}
    tensors = {key: leaf.value for key, leaf in chosen.items() if isinstance(leaf.value, TensorRef)}
    if not tensors:
        raise _no_weights(source, part, list(leaves))
    names = {key[len(prefix) + 1 :] if prefix else key: (key, ref) for key, ref in tensors.items()}
    return ModelPart(prefix, _without_wrappers(names), [key for key in leaves if key not in tensors])


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


def _first(leaf: StoredNode) -> str:
    """The first step to a leaf; of a flat key, what comes before its first dot."""
    return str(leaf.path[0]).partition(".")[0] if leaf.path else ""


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
