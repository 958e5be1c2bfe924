"""A state that was loaded with tensors in it, seen as a tree of references and the tensors by key."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from holdfast._compat.tensors import storage_identity
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.torch_elements import dtype_of
from holdfast._formats.native.values import keys_of
from holdfast.errors import UnsupportedValueError

Path: TypeAlias = tuple[Any, ...]

_DEEPEST = 100
_MOST_LEAVES = 4_000_000
_ATOMS = frozenset([type(None), bool, int, float, complex, str, bytes])
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


@dataclass
class OpenedState:
    """The tree, and what its references refer to."""

    tree: Any
    refs: dict[str, TensorRef] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: list[Any] = field(default_factory=list)
    """All else that has a key."""


def open_state(state: Any, source: str) -> OpenedState:
    """Put references in place of the tensors in the containers of ``state``, which itself stays as it is.

    Tied tensors, which are the same elements in the same memory, have the same reference: that of the first name.
    ``source`` is how errors call the file that it comes from.

    >>> opened = open_state({"model": {"w": torch.ones(2)}, "lrs": [0.1, 0.2]}, "a file")
    >>> opened.tree["model"]["w"].key, opened.tree["lrs"], opened.tensors["model.w"]
    ('model.w', [0.1, 0.2], tensor([1., 1.]))
    """
    finding = _Finding(source)
    leaves = list(finding.leaves(state, ()))
    paths = [path for path, _ in leaves]
    opened = OpenedState(None)
    references: dict[Path, TensorRef] = {}
    known: dict[Any, TensorRef] = {}
    for key, (path, value) in zip(keys_of(paths), leaves, strict=True):
        if _is_plain_tensor(value):
            dtype = dtype_of(value.dtype)
            assert dtype is not None
            ref = references[path] = known.setdefault(_memory_of(value), TensorRef(key, dtype, tuple(value.shape)))
            if opened.refs.setdefault(ref.key, ref) is not ref:
                raise finding.unreadable(
                    path, "has two tensors below keys of a dict that cannot be told apart, as a nan from another nan"
                )
            opened.tensors.setdefault(ref.key, value.detach())
        elif type(value) not in _ATOMS:
            opened.values.append(value)
    opened.tree = finding.rebuilt(state, (), references)
    return opened


class _Finding:
    """Goes through a state that nobody has vouched for: it may contain itself, or the same list a million times."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._known: dict[int, bool] = {}
        self._count = 0

    def leaves(self, value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
        """Everything that has a key: dicts are opened, lists and tuples only if there is a tensor in them."""
        children = self._children(value, path)
        if children and (isinstance(value, dict) or self._holds_tensor(value, path)):
            for item, child in children:
                yield from self.leaves(child, (*path, item))
            return
        self._count += 1
        if self._count > _MOST_LEAVES:
            raise self.unreadable(path, f"has more than {_MOST_LEAVES} values")
        yield path, value

    def rebuilt(self, value: Any, path: Path, references: Mapping[Path, TensorRef]) -> Any:
        """The same containers with references in them. What holds no tensor stays the same object."""
        if not self._holds_tensor(value, path):
            return value
        if _is_plain_tensor(value):
            return references[path]
        children = [
            (item, self.rebuilt(child, (*path, item), references)) for item, child in self._children(value, path)
        ]
        return _container_like(value, children)

    def _holds_tensor(self, value: Any, path: Path) -> bool:
        if _is_plain_tensor(value):
            return True
        children = self._children(value, path)
        if not children:
            return False
        if id(value) not in self._known:
            self._known[id(value)] = any(self._holds_tensor(child, (*path, item)) for item, child in children)
        return self._known[id(value)]

    def _children(self, value: Any, path: Path) -> list[tuple[Any, Any]]:
        """What is in a container that is opened; nothing for everything else."""
        kind = type(value)
        found: Iterable[tuple[Any, Any]] = ()
        if kind in (dict, OrderedDict, defaultdict, Counter):
            found = value.items()
        elif kind in (list, tuple):
            found = () if _ATOMS.issuperset(map(type, value)) else enumerate(value)
        elif _is_namedtuple(value):
            found = zip(value._fields, value, strict=True)
        children = list(found)
        if children and len(path) >= _DEEPEST:
            raise self.unreadable(path, f"is nested deeper than {_DEEPEST} levels, or in itself")
        return children

    def unreadable(self, path: Path, why: str) -> UnsupportedValueError:
        """What to raise if a state is one that cannot be given as a checkpoint."""
        place = ".".join(map(str, path[:8]))
        return UnsupportedValueError(
            f"{self._source}: the state {why}, at '{place}…'. It cannot be read as a checkpoint. "
            "Load it with torch.load.",
            key=place,
        )


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Which elements in which memory a tensor is."""
    storage = storage_identity(tensor.untyped_storage())
    is_lazy = (tensor.is_conj(), tensor.is_neg())
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, is_lazy


def _container_like(value: Any, children: list[tuple[Any, Any]]) -> Any:
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory, children)
    if isinstance(value, dict):
        return type(value)(dict(children))
    items = [child for _, child in children]
    return type(value)(*items) if _is_namedtuple(value) else type(value)(items)


def _is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and type(value).__bases__ == (tuple,) and hasattr(value, "_fields")


def _is_plain_tensor(value: Any) -> bool:
    """Whether a tensor is nothing but its elements in memory. Others stay what they are, as values."""
    return (
        type(value) in _PLAIN_TENSORS
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and dtype_of(value.dtype) is not None
    )
