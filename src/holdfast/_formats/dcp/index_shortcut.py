"""Reading the flat records of an index many opcodes at a time.

An index has three records by the hundred thousand: chunks, item names and item places. Each takes the machine
of ``safe_pickle`` some thirty opcodes, in an order that stock torch and ``index_writer`` never vary. Here one
regular expression finds the fields of such a record, and goes on with the next one as long as it matches.
Everything that looks different is left to the machine. Either way the fields end in the same checks, so all
that this module can change is the time.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from holdfast._formats.archives.known_names import SKIPPED, AllowedName, Draft, Inert, brief, one_bit_away
from holdfast._formats.archives.pickle_machine import Machine

logger = logging.getLogger("holdfast.formats.dcp")

_Value: TypeAlias = tuple[Any, tuple[Any, ...]]
"""A field's value, and what its opcodes put into the memo."""
_Make: TypeAlias = Callable[..., Any]

# Pickle has no jumps: what matches at the machine's position is what it would execute next.
GET = rb"(?:h.|j....)"
_INT = rb"(?:K.|M..|J....|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
_TEXT = rb"\x8c(?:%b)\x94?" % b"|".join(b"\\x%02x.{%d}" % (length, length) for length in range(1, 256))
NUMBERS = rb"(?:\)|%(int)b\x85|%(int)b{2}\x86|%(int)b{3}\x87|\(%(int)b*t)\x94?" % {b"int": _INT}
GET_OR_SHAPE = rb"%b(?:%b\x85\x94?R\x94?)?" % (GET, NUMBERS)
_FIELD = rb"(%b)(%b)" % (GET, b"|".join((GET_OR_SHAPE, _INT, rb"N", _TEXT, NUMBERS)))

# From behind the empty argument tuple to BUILD, with two to four fields. "\x94" puts into the memo.
_RECORD = rb"\x81(\x94?)\}(\x94?)\(%(field)b%(field)b(?:%(field)b(?:%(field)b)?)?ub" % {b"field": _FIELD}
_FIRST = re.compile(_RECORD, re.DOTALL)
_NEXT = re.compile(rb"(%b)\)" % GET + _RECORD, re.DOTALL)

_SHAPE_PARTS = re.compile(rb"(%b)(%b)\x85(\x94?)R(\x94?)" % (GET, NUMBERS), re.DOTALL)
_EACH_INT = re.compile(_INT, re.DOTALL)
_INT_LENGTHS = {ord("K"): 2, ord("M"): 3, ord("J"): 5}
_GET_LENGTHS = {ord("h"): 2, ord("j"): 5}
_INT32_OPCODE, _LONG_OPCODE, _TEXT_OPCODE, _NONE_OPCODE = ord("J"), 0x8A, 0x8C, ord("N")


def count(value: Any) -> int:
    """A size or position: an int that is not negative."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{brief(value)} as a size or position")
    return value


def make_size(numbers: Any = ()) -> torch.Size:
    """A shape, or an offset in every dimension."""
    if not isinstance(numbers, (tuple, list)):
        raise TypeError(f"{brief(numbers)} as a shape")
    return torch.Size([count(number) for number in numbers])


SIZE = AllowedName(Inert("torch.Size"), call=make_size)


@lru_cache(maxsize=64)
def _log_unknown(field: str) -> None:
    logger.warning("the index of a checkpoint has %s, which a newer torch has added; it is passed over", field)


class FlatRecord:
    """A record whose fields are texts, numbers, shapes and nothing else.

    ``make`` takes the fields by name, or in the order of ``names``, which is that of the writers.
    """

    def __init__(self, name: str, names: Sequence[str], make: _Make) -> None:
        self._name = name
        self._names = tuple(names)
        self._make = make

    def known(self) -> AllowedName:
        """The entry for the table."""
        return AllowedName(Inert(self._name), new=lambda: Draft(self._finish), shortcut=self._shortcut, hint=self)

    def maker(self, names: Sequence[Any]) -> _Make | None:
        """What makes a record of the values of ``names``, in this order; None if the order is another."""
        return self._make if tuple(names) == self._names[: len(names)] else None

    def _finish(self, state: Any) -> Any:
        if type(state) is not dict:
            raise TypeError(f"{brief(state)} as the fields of {self._name}")
        for name in state.keys() - set(self._names):
            self._look_at_unknown(name, state[name])
        return self._make(**{name: state[name] for name in self._names if name in state})

    def _look_at_unknown(self, name: Any, value: Any) -> None:
        """Pass over a field that a newer version has added, and say so once in the log.

        If it changes what the stored bytes mean (as the names of compressions did, once), they are not an archive of a
        tensor any more, and reading them is an error. A name that one flipped bit makes of a known one is damage.
        """
        if type(name) is not str or not set(self._names).isdisjoint(one_bit_away(name)):
            raise ValueError(f"{brief(name)} as a field of {self._name}")
        if value is not None:
            _log_unknown(f"{self._name}.{name:.80}")

    def _shortcut(self, machine: Machine) -> bool:
        """Make the record whose class is on the stack, and the flat records that follow it directly."""
        match = _FIRST.match(machine.data, machine.position)
        if match is None:
            return False
        opcodes = machine.scratch.get(_Opcodes)
        if opcodes is None:
            opcodes = machine.scratch[_Opcodes] = _Opcodes(machine)
        stack = machine.stack
        cls = stack.pop()
        if not opcodes.push_record(self, *match.groups()):
            stack.append(cls)
            return False
        end = match.end()
        while (match := _NEXT.match(machine.data, end)) and opcodes.push_record(*match.groups()):
            end = match.end()
        machine.position = end
        return True


class _Opcodes:
    """What the opcodes of one pickle mean. What may come again is looked up once per different bytes."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._memo = machine.memo
        self._values: dict[bytes, _Value] = {}
        self._makers: dict[tuple[Any, ...], _Make | None] = {}

    def push_record(
        self,
        cls: bytes | FlatRecord,
        in_memo: bytes,
        state_in_memo: bytes,
        key1: bytes,
        value1: bytes,
        key2: bytes,
        value2: bytes,
        key3: bytes | None,
        value3: bytes | None,
        key4: bytes | None,
        value4: bytes | None,
    ) -> bool:
        """Do what the opcodes of one record do; False, and nothing, if the machine must."""
        signature = (cls, key1, key2, key3, key4)
        if signature not in self._makers:
            self._makers[signature] = self._maker(*signature)
        make = self._makers[signature]
        if make is None:
            return False
        values = []
        remembered: tuple[Any, ...] = ()
        for encoded in (value1, value2, value3, value4):
            if encoded is None:
                break
            value = self._values.get(encoded) or self._value(encoded)
            if value is None:
                return False
            values.append(value[0])
            if value[1]:
                remembered += value[1]
        record = make(*values)
        # First the object comes into the memo, then its state, then what is in that.
        if in_memo:
            self._memo.append(record)
        if state_in_memo:
            self._memo.append(SKIPPED)
        if remembered:
            self._memo += remembered
        self._machine.stack.append(record)
        return True

    def _maker(self, cls: bytes | FlatRecord, *keys: bytes | None) -> _Make | None:
        if isinstance(cls, bytes):
            named = self._recall(cls)
            known = None if named is None else self._machine.known(named[0])
            if known is None or not isinstance(known.hint, FlatRecord):
                return None
            cls = known.hint
        names = [self._recall(key) for key in keys if key is not None]
        return cls.maker([None if name is None else name[0] for name in names])

    def _value(self, encoded: bytes) -> _Value | None:
        value: _Value | None
        opcode = encoded[0]
        if _INT_LENGTHS.get(opcode) == len(encoded):
            value = int.from_bytes(encoded[1:], "little", signed=opcode == _INT32_OPCODE), ()
            if opcode != _INT32_OPCODE:  # there are few of those, and most come again: lengths, and which chunk it is
                self._values[encoded] = value
            return value
        if opcode == _TEXT_OPCODE:
            end = 2 + encoded[1]
            text = str(encoded[2:end], "utf-8", "surrogatepass")
            return text, (text,) * (len(encoded) - end)
        if opcode == _NONE_OPCODE:
            return None, ()
        if opcode not in _GET_LENGTHS:
            return _integers(encoded)
        is_reference = len(encoded) == _GET_LENGTHS[opcode]
        value = self._recall(encoded) if is_reference else self._shape(encoded)
        if value is not None:
            self._values[encoded] = value
        return value

    def _recall(self, get: bytes) -> _Value | None:
        slot = int.from_bytes(get[1:], "little")
        value = self._memo[slot] if slot < len(self._memo) else SKIPPED
        return None if value is SKIPPED or type(value) is Draft else (value, ())

    def _shape(self, encoded: bytes) -> _Value | None:
        parts = _SHAPE_PARTS.fullmatch(encoded)
        if parts is None or self._recall(parts[1]) != (SIZE.value, ()):
            return None
        integers, in_memo = _integers(parts[2])
        shape = make_size(integers)
        return shape, (SKIPPED,) * (len(in_memo) + len(parts[3])) + (shape,) * len(parts[4])


def _integers(encoded: bytes) -> _Value:
    """One integer, or several in a tuple."""
    length = 2 + encoded[1] if encoded[0] == _LONG_OPCODE else _INT_LENGTHS.get(encoded[0])
    if length == len(encoded):
        return _integer(encoded), ()
    integers = tuple(map(_integer, _EACH_INT.findall(encoded)))
    return integers, (integers,) * encoded.endswith(b"\x94")


def _integer(encoded: bytes) -> int:
    if encoded[0] == _LONG_OPCODE:
        return int.from_bytes(encoded[2:], "little", signed=True)
    return int.from_bytes(encoded[1:], "little", signed=encoded[0] == _INT32_OPCODE)
