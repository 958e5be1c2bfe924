"""Tools of an attacker: pickles opcode by opcode, and a bait that shows whether anything ran."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import HoldfastError

MEBIBYTE = 1 << 20


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + len(encoded).to_bytes(4, "little") + encoded


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def stacked_name(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + b"\x93"


def arguments(*pushes: bytes) -> bytes:
    return b"(" + b"".join(pushes) + b"t"


def data(value: Any) -> bytes:
    """Opcodes that push plain data. Without memo entries, so that they fit in anywhere."""
    match value:
        case None | bool():
            return {None: b"N", True: b"\x88", False: b"\x89"}[value]
        case int():
            size = value.bit_length() // 8 + 1
            return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
        case float():
            return pickle.dumps(value, 2)[2:-1]
        case str():
            return text(value)
        case bytes():
            return b"B" + len(value).to_bytes(4, "little") + value
        case tuple():
            return arguments(*map(data, value))
        case list():
            return b"](" + b"".join(map(data, value)) + b"e"
        case dict():
            return b"}(" + b"".join(data(key) + data(inner) for key, inner in value.items()) + b"u"
    raise TypeError(type(value))


def call(function: bytes, *pushes: bytes) -> bytes:
    return function + arguments(*pushes) + b"R"


def pickled(program: bytes, protocol: int = 4) -> bytes:
    return b"\x80" + bytes([protocol]) + program + b"."


class Bait:
    """A file that appears when something of an attack runs."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "something-ran"

    @property
    def command(self) -> str:
        return f"touch {self.path}"

    @property
    def statement(self) -> str:
        return f"open({str(self.path)!r}, 'w').close()"

    def assert_untouched(self) -> None:
        assert not self.path.exists()


@pytest.fixture
def bait(tmp_path: Path) -> Bait:
    return Bait(tmp_path)


CODE: dict[str, Callable[[Bait], bytes]] = {
    "os.system": lambda bait: call(name("os", "system"), text(bait.command)),
    "posix.system": lambda bait: call(name("posix", "system"), text(bait.command)),
    "nt.system": lambda bait: call(stacked_name("nt", "system"), text(bait.command)),
    "subprocess.Popen": lambda bait: call(name("subprocess", "Popen"), text(bait.command)),
    "builtins.eval": lambda bait: call(name("builtins", "eval"), text(bait.statement)),
    "builtins.exec": lambda bait: call(stacked_name("builtins", "exec"), text(bait.statement)),
    "__builtin__.eval": lambda bait: call(name("__builtin__", "eval"), text(bait.statement)),
    "builtins.__import__": lambda bait: call(name("builtins", "__import__"), text("antigravity")),
    "builtins.open": lambda bait: call(name("builtins", "open"), text(str(bait.path)), text("w")),
    "io.open": lambda bait: call(name("io", "open"), text(str(bait.path)), text("w")),
    "runpy._run_code": lambda bait: call(name("runpy", "_run_code"), text(bait.statement), b"}"),
    "timeit.timeit": lambda bait: call(name("timeit", "timeit"), text(bait.statement)),
    "pathlib.Path.touch": lambda bait: call(stacked_name("pathlib", "Path.touch"), text(str(bait.path))),
    "pickle.loads": lambda bait: call(
        name("pickle", "loads"), data(pickled(call(name("os", "system"), text(bait.command))))
    ),
    "torch.load": lambda bait: call(name("torch", "load"), text("/tmp/other.pt")),
    "torch.storage._load_from_bytes": lambda bait: call(
        name("torch.storage", "_load_from_bytes"), data(pickled(call(name("os", "system"), text(bait.command))))
    ),
    "functools.partial": lambda bait: call(name("functools", "partial"), name("os", "system"), text(bait.command)),
    "operator.attrgetter": lambda bait: call(name("operator", "attrgetter"), text("__class__.__subclasses__")),
    "importlib.import_module": lambda bait: call(name("importlib", "import_module"), text("antigravity")),
    "logging.config.listen": lambda bait: call(name("logging.config", "listen"), b"K\x00"),
    "copyreg._reconstructor": lambda bait: call(
        name("copyreg", "_reconstructor"), name("os", "_wrap_close"), name("builtins", "object"), b"N"
    ),
    "types.CodeType": lambda bait: name("types", "CodeType"),
    "holdfast.errors._rebuild": lambda bait: call(
        name("holdfast.errors", "_rebuild"), name("os", "system"), text(bait.command), b"}"
    ),
    "a dotted way to os.system": lambda bait: call(stacked_name("torch", "os.system"), text(bait.command)),
    "a module inside of a known one": lambda bait: call(stacked_name("collections", "_sys.exit"), b"K\x01"),
    "NEWOBJ": lambda bait: name("subprocess", "Popen") + arguments(text(bait.command)) + b"\x81",
    "NEWOBJ_EX": lambda bait: name("subprocess", "Popen") + arguments(text(bait.command)) + b"}\x92",
}
"""Programs that run something when the ordinary unpickler reads them; each must be refused by name."""

HARMFUL: dict[str, bytes] = {
    "INST": b"(" + text("true") + b"ios\nsystem\n",
    "OBJ": b"(" + name("collections", "OrderedDict") + text("true") + b"o",
    "EXT1": b"\x82\x01",
    "EXT2": b"\x83\x01\x00",
    "EXT4": b"\x84\x01\x00\x00\x00",
    "a buffer from outside": b"\x97",
    "a read-only buffer": b"N\x98",
    "a persistent id in text": b"P1\n",
    "a call of text": text("os.system") + b")R",
    "a call of a tuple": b"))R",
    "a call without a tuple": name("collections", "OrderedDict") + b"]R",
    "an object of a number": b"K\x01)\x81",
    "a state for a class": name("collections", "OrderedDict") + b"N" + data({"keys": 1}) + b"\x86b",
    "a dictionary as state for a class": name("collections", "OrderedDict") + data({"keys": 1}) + b"b",
    "a state for a dtype": name("torch", "float32") + b"N" + data({"is_complex": True}) + b"\x86b",
    "a state for a list": b"]" + data({"append": 1}) + b"b",
    "items for a class": name("collections", "OrderedDict") + data("a") + data(1) + b"s",
}
"""Programs that misuse what is allowed; each must be called damage."""


def assert_refused(error: type[HoldfastError], read: Callable[[], Any], bait: Bait | None = None) -> HoldfastError:
    """``read`` fails with exactly this error, cheaply, and nothing has run."""
    tracemalloc.start()
    try:
        with pytest.raises(HoldfastError) as caught:
            read()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert type(caught.value) is error, caught.value
    assert peak < 16 * MEBIBYTE
    assert len(str(caught.value)) < 2000
    if bait is not None:
        bait.assert_untouched()
    return caught.value
