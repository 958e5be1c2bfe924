"""How much memory a pickle of ``torch.save`` asks for, found out without making anything that it describes.

Torch reserves what a file asks for before it looks for the bytes, and lets a tensor that does not fit into its storage
have a larger one. So a few bytes can ask for gigabytes. Here the opcodes are followed with stand-ins for all objects
but numbers, texts and tuples, and what a call would reserve is summed up.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable, Mapping
from typing import IO, Any, NamedTuple

import torch

from holdfast._formats.archives.tensor_records import LEGACY_STORAGES

_ITEM_SIZES = {name: dtype.itemsize for dtype, name in LEGACY_STORAGES.items()} | {"UntypedStorage": 1}
_LARGEST_ITEM = 16
_MADE_FROM_STORAGES = {"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor"}


class Name(NamedTuple):
    """A function or class that the file names."""

    module: str
    name: str

    @property
    def reserves(self) -> bool:
        """Whether a call with numbers reserves memory for so many elements."""
        if self.module in ("builtins", "__builtin__"):
            return self.name == "bytearray"
        return self.module.partition(".")[0] == "torch" and self.name.endswith(("Tensor", "Storage", "Parameter"))


class Storage(NamedTuple):
    """Memory for elements that are somewhere else in the file."""

    key: str
    nbytes: int
    item_size: int | None
    """None if the type is not known, and with it neither is ``nbytes``."""


class _Made(NamedTuple):
    """What a call would return."""

    function: Any


class Claims:
    """What the pickles of a file ask for. A stream is read with ``follow``, one pickle at a time."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        """As often as they are referred to."""
        self.reserved = 0
        """How many bytes are asked for by calls, beside storages."""
        self._mark = object()
        self._stack: list[Any] = []
        self._memo: dict[Any, Any] = {}

    def follow(self, stream: IO[bytes]) -> None:
        """Go through the next pickle. Raises ``ValueError`` or ``LookupError`` if it is none, or is cut off."""
        self._stack, self._memo = [], {}
        for opcode, argument, _ in pickletools.genops(stream):
            act = _ACTS.get(opcode.name)
            if act is not None:
                act(self, argument)
            elif len(opcode.stack_after) == 1 and not opcode.stack_before:
                self._stack.append(argument)

    def _items(self) -> tuple[Any, ...]:
        """What was put on the stack since the last mark, which goes away as well."""
        stack = self._stack
        position = len(stack) - 1
        while stack[position] is not self._mark:
            position -= 1
            if position < 0:
                raise LookupError("the pickle has no mark where one must be")
        items = tuple(stack[position + 1 :])
        del stack[position:]
        return items

    def _call(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            return _Made(function)
        if function == Name("torch", "Size") and len(arguments) == 1:
            return arguments[0]
        if function.name == "_rebuild_from_type_v2" and len(arguments) > 2:
            self._call(arguments[0], arguments[2])
        elif function.name in _MADE_FROM_STORAGES:
            dtype = arguments[6] if function.name.endswith("_v3") and len(arguments) > 6 else None
            self._use(arguments[:4], dtype, all_of_it=function.name == "_rebuild_qtensor")
        elif function.reserves:
            sizes = _numbers(arguments)
            self.reserved += math.prod(sizes) * _LARGEST_ITEM if sizes else 0
        return _Made(function)

    def _use(self, arguments: tuple[Any, ...], dtype: Any, *, all_of_it: bool = False) -> None:
        """A tensor is made of elements of a storage, which grows if it is too small."""
        if len(arguments) < 4 or not isinstance(arguments[0], Storage):
            return
        storage, offset, sizes, steps = arguments
        if not (type(offset) is int and _are_numbers(sizes) and _are_numbers(steps)) or 0 in sizes:
            return
        item_size = storage.item_size
        if isinstance(dtype, Name):
            known = getattr(torch, dtype.name, None)
            item_size = known.itemsize if isinstance(known, torch.dtype) else item_size
        if item_size is None:
            return
        reach = offset + 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=False))
        needed = (max(reach, math.prod(sizes)) if all_of_it else reach) * item_size
        self.reserved += needed if needed > storage.nbytes or all_of_it else 0

    def _refer(self, reference: Any) -> Any:
        if not isinstance(reference, tuple) or len(reference) < 5 or _text(reference[0]) != "storage":
            return _Made(None)
        kind, key, count = reference[1], str(_text(reference[2])), reference[4]
        item_size = _ITEM_SIZES.get(kind.name) if isinstance(kind, Name) else None
        # What torch knows and this table does not (quantized types) has items of a byte at least.
        nbytes = count * (item_size or 1) if type(count) is int else 0
        self.storages.append(Storage(key, nbytes, item_size))
        return self.storages[-1]

    # What opcodes do that are more than an argument on the stack.

    def _tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise LookupError("the pickle takes more from its stack than there is")
        items = tuple(self._stack[len(self._stack) - count :])
        del self._stack[len(self._stack) - count :]
        self._stack.append(items)

    def _drop(self, count: int) -> None:
        for _ in range(count):
            self._stack.pop()

    def _reduce(self, _: Any) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        self._stack.append(self._call(function, arguments))

    def _new_with_keywords(self, _: Any) -> None:
        self._stack.pop()
        self._reduce(None)

    def _build(self, _: Any) -> None:
        state = self._stack.pop()
        if isinstance(self._stack[-1], _Made) and isinstance(state, tuple):
            self._use(state[:4], None)

    def _instance(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._stack.append(self._call(Name(module, name), self._items()))

    def _object(self, _: Any) -> None:
        items = self._items()
        self._stack.append(self._call(items[0], items[1:]))

    def _name(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._stack.append(Name(module, name))

    def _name_on_stack(self, _: Any) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._stack.append(Name(str(module), str(name)))

    def _container(self, _: Any) -> None:
        self._items()
        self._stack.append(None)

    def _remember(self, slot: Any) -> None:
        self._memo[int(slot)] = self._stack[-1]

    def _recall(self, slot: Any) -> None:
        self._stack.append(self._memo[int(slot)])


def _text(value: Any) -> Any:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _are_numbers(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(item) is int for item in value)


def _numbers(arguments: tuple[Any, ...]) -> list[int]:
    """The sizes among arguments: numbers, or tuples of them."""
    found = [item for item in arguments if type(item) is int]
    return found + [item for each in arguments if _are_numbers(each) for item in each]


_Act = Callable[[Claims, Any], Any]

_ACTS: Mapping[str, _Act] = {
    "MARK": lambda claims, _: claims._stack.append(claims._mark),
    "POP": lambda claims, _: claims._drop(1),
    "POP_MARK": lambda claims, _: claims._items(),
    "DUP": lambda claims, _: claims._stack.append(claims._stack[-1]),
    "TUPLE": lambda claims, _: claims._stack.append(claims._items()),
    "EMPTY_TUPLE": lambda claims, _: claims._stack.append(()),
    "TUPLE1": lambda claims, _: claims._tuple(1),
    "TUPLE2": lambda claims, _: claims._tuple(2),
    "TUPLE3": lambda claims, _: claims._tuple(3),
    "LIST": Claims._container,
    "DICT": Claims._container,
    "FROZENSET": Claims._container,
    "APPEND": lambda claims, _: claims._drop(1),
    "SETITEM": lambda claims, _: claims._drop(2),
    "APPENDS": lambda claims, _: claims._items(),
    "SETITEMS": lambda claims, _: claims._items(),
    "ADDITEMS": lambda claims, _: claims._items(),
    "PUT": Claims._remember,
    "BINPUT": Claims._remember,
    "LONG_BINPUT": Claims._remember,
    "MEMOIZE": lambda claims, _: claims._remember(len(claims._memo)),
    "GET": Claims._recall,
    "BINGET": Claims._recall,
    "LONG_BINGET": Claims._recall,
    "GLOBAL": Claims._name,
    "STACK_GLOBAL": Claims._name_on_stack,
    "INST": Claims._instance,
    "OBJ": Claims._object,
    "REDUCE": Claims._reduce,
    "NEWOBJ": Claims._reduce,
    "NEWOBJ_EX": Claims._new_with_keywords,
    "BUILD": Claims._build,
    "BINPERSID": lambda claims, _: claims._stack.append(claims._refer(claims._stack.pop())),
    "PERSID": lambda claims, _: claims._stack.append(_Made(None)),
    "STOP": lambda claims, _: None,
}
