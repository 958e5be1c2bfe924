"""A small machine for pickle's opcodes, protocols 2 to 5. It calls nothing but what a closed table holds.

``safe_pickle.load`` is the way to use it; there is also said why it exists.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from holdfast._formats.archives.known_names import (
    PLAIN_KEYS,
    SKIPPED,
    AllowedName,
    Draft,
    Find,
    Refusal,
    brief,
    hash_work,
)

_UINT16 = struct.Struct("<H")
_INT32 = struct.Struct("<i")
_UINT32 = struct.Struct("<I")
_UINT64 = struct.Struct("<Q")
_DOUBLE = struct.Struct(">d")
_HIGHEST_PROTOCOL = 5
_LEAST_HASH_WORK = 1 << 18
"""How many parts of tuples may be hashed for a small file; for a large one it grows with its size."""


class Machine:
    """The state of one reading. Opcodes are methods; ``run`` executes them until the file says stop."""

    __slots__ = (
        "_find",
        "_hash_work",
        "_marks",
        "_named",
        "_persistent_load",
        "_unfinished",
        "data",
        "memo",
        "position",
        "scratch",
        "stack",
    )

    def __init__(self, data: bytes, find: Find, persistent_load: Callable[[Any], Any] | None) -> None:
        self.data = data
        self.position = 0
        self.stack: list[Any] = []
        self.scratch: dict[Any, Any] = {}  # for shortcuts, to keep what they learn about this file
        self.memo: list[Any] = []
        self._marks: list[list[Any]] = []
        self._find = find
        self._named: dict[int, AllowedName] = {}
        self._unfinished = 0
        self._hash_work = _LEAST_HASH_WORK + 4 * len(data)
        self._persistent_load = persistent_load

    def run(self) -> Any:
        data, opcodes = self.data, _OPCODES
        while True:
            opcode = data[self.position]
            self.position += 1
            if opcode == _STOP:
                break
            execute = opcodes[opcode]
            if execute is None:
                raise ValueError(f"opcode {opcode:#04x}, which protocols 2 to 5 do not use for data")
            execute(self)
        (result,) = self.stack
        if self._marks or self._unfinished:
            raise ValueError("an unfinished object at the end")
        return result

    def run_to(self, end: int) -> None:
        """Execute the opcodes up to a position at which one ends. For shortcuts, which know that there is one."""
        while self.position < end:
            execute = _OPCODES[self.data[self.position]]
            assert execute is not None
            self.position += 1
            execute(self)

    def known(self, value: Any) -> AllowedName | None:
        """The entry behind something that the file has named, or that a call has found for it."""
        known = self._named.get(id(value))
        if known is None and isinstance(value, type):
            known = self._find(value.__module__, value.__qualname__)
            if known is None or known.value is not value:
                return None
            self._named[id(value)] = known
        return known

    # Raw input

    def _take(self, count: int) -> bytes:
        end = self.position + count
        if count < 0 or end > len(self.data):
            raise EOFError(f"{count} bytes expected, {len(self.data) - self.position} left")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def _number(self, form: struct.Struct) -> Any:
        (number,) = form.unpack_from(self.data, self.position)
        self.position += form.size
        return number

    def _line(self) -> str:
        end = self.data.index(b"\n", self.position)
        return self._take(end + 1 - self.position)[:-1].decode()

    def _items(self) -> list[Any]:
        items, self.stack = self.stack, self._marks.pop()
        return items

    # Framing and the stack

    def _proto(self) -> None:
        if self._take(1)[0] > _HIGHEST_PROTOCOL:
            raise ValueError("a pickle protocol that does not exist yet")

    def _frame(self) -> None:
        if self._number(_UINT64) > len(self.data) - self.position:
            raise EOFError("a frame that goes beyond the end")

    def _mark(self) -> None:
        self._marks.append(self.stack)
        self.stack = []

    def _pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self._items()

    def _pop_mark(self) -> None:
        self._items()

    def _duplicate(self) -> None:
        self._push_again(self.stack[-1])

    # Atoms

    def _none(self) -> None:
        self.stack.append(None)

    def _true(self) -> None:
        self.stack.append(True)

    def _false(self) -> None:
        self.stack.append(False)

    def _int8(self) -> None:
        self.stack.append(self.data[self.position])
        self.position += 1

    def _int16(self) -> None:
        self.stack.append(self._number(_UINT16))

    def _int32(self) -> None:
        self.stack.append(self._number(_INT32))

    def _long1(self) -> None:
        self.stack.append(int.from_bytes(self._take(self._take(1)[0]), "little", signed=True))

    def _long4(self) -> None:
        self.stack.append(int.from_bytes(self._take(self._number(_INT32)), "little", signed=True))

    def _float(self) -> None:
        self.stack.append(self._number(_DOUBLE))

    def _push_text(self, length: int) -> None:
        self.stack.append(self._take(length).decode("utf-8", "surrogatepass"))

    def _text8(self) -> None:
        self._push_text(self._take(1)[0])

    def _text32(self) -> None:
        self._push_text(self._number(_UINT32))

    def _text64(self) -> None:
        self._push_text(self._number(_UINT64))

    def _bytes8(self) -> None:
        self.stack.append(self._take(self._take(1)[0]))

    def _bytes32(self) -> None:
        self.stack.append(self._take(self._number(_UINT32)))

    def _bytes64(self) -> None:
        self.stack.append(self._take(self._number(_UINT64)))

    def _bytearray64(self) -> None:
        self.stack.append(bytearray(self._take(self._number(_UINT64))))

    # Containers

    def _empty_tuple(self) -> None:
        if self.stack and self.data[self.position] == _NEWOBJ:
            named = self._named.get(id(self.stack[-1]))
            if named is not None and named.shortcut is not None and named.shortcut(self):
                return
        self.stack.append(())

    def _tuple1(self) -> None:
        self.stack[-1] = (self.stack[-1],)

    def _tuple2(self) -> None:
        self.stack[-2:] = [(self.stack[-2], self.stack[-1])]

    def _tuple3(self) -> None:
        self.stack[-3:] = [(self.stack[-3], self.stack[-2], self.stack[-1])]

    def _tuple(self) -> None:
        items = self._items()
        self.stack.append(tuple(items))

    def _empty_list(self) -> None:
        self.stack.append([])

    def _list(self) -> None:
        items = self._items()
        self.stack.append(items)

    def _append(self) -> None:
        item = self.stack.pop()
        self._extend([item])

    def _appends(self) -> None:
        self._extend(self._items())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (list, deque) and not (self._is_ours(target) and isinstance(target, (list, deque))):
            raise TypeError(f"items for a {type(target).__name__}")
        target.extend(items)

    def _empty_dict(self) -> None:
        self.stack.append({})

    def _dict(self) -> None:
        items = self._items()
        self.stack.append({})
        self._update(items)

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def _setitems(self) -> None:
        self._update(self._items())

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict and not (self._is_ours(target) and isinstance(target, dict)):
            raise TypeError(f"entries for a {type(target).__name__}")
        if len(items) % 2:
            raise ValueError("a key without a value")
        self._allow_hashes(items[::2])
        for position in range(0, len(items), 2):
            target[items[position]] = items[position + 1]

    def _empty_set(self) -> None:
        self.stack.append(set())

    def _additems(self) -> None:
        items = self._items()
        target = self.stack[-1]
        if type(target) is not set:
            raise TypeError(f"members for a {type(target).__name__}")
        self._allow_hashes(items)
        target.update(items)

    def _frozenset(self) -> None:
        items = self._items()
        self._allow_hashes(items)
        self.stack.append(frozenset(items))

    def _allow_hashes(self, keys: Iterable[Any]) -> None:
        for key in keys:
            if type(key) not in PLAIN_KEYS:
                self._hash_work -= hash_work(key, self._hash_work)

    # The memo

    def _remember(self, slot: int) -> None:
        value = self.stack[-1]
        if type(value) is Draft:
            value.slots.append(slot)
        if slot > len(self.memo):
            raise ValueError(f"memo slot {slot} before slot {len(self.memo)}")
        if slot < len(self.memo):
            self.scratch.clear()  # references to it mean something else from here on
        self.memo[slot : slot + 1] = [value]

    def _memoize(self) -> None:
        value = self.stack[-1]
        if type(value) is Draft:
            value.slots.append(len(self.memo))
        self.memo.append(value)

    def _put8(self) -> None:
        self._remember(self._take(1)[0])

    def _put32(self) -> None:
        self._remember(self._number(_UINT32))

    def _push_again(self, value: Any) -> None:
        if value is SKIPPED or type(value) is Draft:
            raise ValueError("a reference to something that has no second use")
        self.stack.append(value)

    def _get8(self) -> None:
        self._push_again(self.memo[self.data[self.position]])
        self.position += 1

    def _get32(self) -> None:
        self._push_again(self.memo[self._number(_UINT32)])

    # Names and objects

    def _push_name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise TypeError("a name that is not a str")
        known = self._find(module, name)
        if known is None:
            raise Refusal(module, name)
        self._named[id(known.value)] = known
        self.stack.append(known.value)

    def _global(self) -> None:
        module = self._line()
        self._push_name(module, self._line())

    def _stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self._push_name(module, name)

    def _is_ours(self, value: Any) -> bool:
        """Whether the class of ``value`` is one that this file may make objects of."""
        return self.known(type(value)) is not None

    def _reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        known = self.known(function)
        if known is None or known.call is None or type(arguments) is not tuple:
            raise TypeError(f"a call of {brief(function)}")
        if known.hashes_items and arguments and isinstance(arguments[0], (list, tuple)):
            self._allow_hashes(arguments[0])
        self._push_made(known.call(*arguments))

    def _new(self) -> None:
        arguments, cls = self.stack.pop(), self.stack.pop()
        self._construct(cls, arguments, {})

    def _new_with_keywords(self) -> None:
        keywords, arguments, cls = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self._construct(cls, arguments, keywords)

    def _construct(self, cls: Any, arguments: Any, keywords: Any) -> None:
        known = self.known(cls)
        if known is None or known.new is None or type(arguments) is not tuple or type(keywords) is not dict:
            raise TypeError(f"a new object of {brief(cls)}")
        self._push_made(known.new(*arguments, **keywords))

    def _push_made(self, value: Any) -> None:
        self._unfinished += type(value) is Draft
        self.stack.append(value)

    def _build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is Draft:
            finished = target.build(state)
            self._unfinished -= 1
            for slot in target.slots:
                if self.memo[slot] is target:
                    self.memo[slot] = finished
            self.stack[-1] = finished
            return
        known = self.known(type(target))
        if known is None or known.build is None:
            raise TypeError(f"a state for a {type(target).__name__}")
        self.stack[-1] = known.build(target, state)

    def _persistent_id(self) -> None:
        if self._persistent_load is None:
            raise ValueError("a reference to something outside of the file")
        self.stack.append(self._persistent_load(self.stack.pop()))


_STOP = ord(".")
_NEWOBJ = 0x81

_OPCODES: list[Callable[[Machine], None] | None] = [None] * 256
for _code, _method in {
    0x80: Machine._proto,
    0x95: Machine._frame,
    ord("("): Machine._mark,
    ord("0"): Machine._pop,
    ord("1"): Machine._pop_mark,
    ord("2"): Machine._duplicate,
    ord("N"): Machine._none,
    0x88: Machine._true,
    0x89: Machine._false,
    ord("K"): Machine._int8,
    ord("M"): Machine._int16,
    ord("J"): Machine._int32,
    0x8A: Machine._long1,
    0x8B: Machine._long4,
    ord("G"): Machine._float,
    0x8C: Machine._text8,
    ord("X"): Machine._text32,
    0x8D: Machine._text64,
    ord("C"): Machine._bytes8,
    ord("B"): Machine._bytes32,
    0x8E: Machine._bytes64,
    0x96: Machine._bytearray64,
    ord(")"): Machine._empty_tuple,
    0x85: Machine._tuple1,
    0x86: Machine._tuple2,
    0x87: Machine._tuple3,
    ord("t"): Machine._tuple,
    ord("]"): Machine._empty_list,
    ord("l"): Machine._list,
    ord("a"): Machine._append,
    ord("e"): Machine._appends,
    ord("}"): Machine._empty_dict,
    ord("d"): Machine._dict,
    ord("s"): Machine._setitem,
    ord("u"): Machine._setitems,
    0x8F: Machine._empty_set,
    0x90: Machine._additems,
    0x91: Machine._frozenset,
    0x94: Machine._memoize,
    ord("q"): Machine._put8,
    ord("r"): Machine._put32,
    ord("h"): Machine._get8,
    ord("j"): Machine._get32,
    ord("c"): Machine._global,
    0x93: Machine._stack_global,
    ord("R"): Machine._reduce,
    _NEWOBJ: Machine._new,
    0x92: Machine._new_with_keywords,
    ord("b"): Machine._build,
    ord("Q"): Machine._persistent_id,
}.items():
    _OPCODES[_code] = _method
