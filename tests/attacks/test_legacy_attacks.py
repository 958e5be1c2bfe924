"""Malicious files of ``torch.save``'s first format: a few bytes that ask for memory, which is not reserved."""

from __future__ import annotations

import pickle
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import DamagedCheckpointError
from tests.attacks.forging import arguments, call, data, name, pickled, text
from tests.exact import assert_same
from tests.formats.dcp.blobs import zipped
from tests.rank_pool import RankPool

GIB = 1 << 30
MAGIC = 0x1950A86A20F9469CFC6C
NO_HOOKS = name("collections", "OrderedDict") + b")R"


def storage(count: int = 2, cls: str = "FloatStorage") -> bytes:
    return arguments(text("storage"), name("torch", cls), text("0"), text("cpu"), data(count), data(None)) + b"Q"


def tensor(sizes: Any = (2,), strides: Any = (1,), of: bytes = b"", offset: int = 0) -> bytes:
    rebuild = name("torch._utils", "_rebuild_tensor_v2")
    return call(rebuild, of or storage(), data(offset), data(sizes), data(strides), data(False), NO_HOOKS)


def in_a_dict(program: bytes) -> bytes:
    return b"}" + text("w") + program + b"s"


def legacy(program: bytes, first: bytes | None = None) -> bytes:
    heads = [pickle.dumps(value, 2) for value in (MAGIC, 1001, {"little_endian": True})]
    if first is not None:
        heads[0] = pickled(first, 2)
    elements = struct.pack("<q", 2) + struct.pack("<2f", 1.0, 2.0)
    return b"".join(heads) + pickled(in_a_dict(program), 2) + pickle.dumps(["0"], 2) + elements


ATTACKS: dict[str, Callable[[], bytes]] = {
    "a storage that is not there": lambda: legacy(tensor(of=storage(GIB))),
    "a storage of doubles": lambda: legacy(tensor(of=storage(GIB // 2, "DoubleStorage"))),
    "a tensor larger than its storage": lambda: legacy(tensor((GIB,))),
    "a tensor with large steps": lambda: legacy(tensor((2,), (GIB,))),
    "a tensor far behind": lambda: legacy(tensor(offset=GIB)),
    "a byte array by number": lambda: legacy(call(name("builtins", "bytearray"), data(4 * GIB))),
    "a byte array by number, of Python 2": lambda: legacy(call(name("__builtin__", "bytearray"), data(4 * GIB))),
    "a byte array before all": lambda: legacy(tensor(), first=call(name("builtins", "bytearray"), data(4 * GIB))),
    "a tensor by number": lambda: legacy(call(name("torch", "Tensor"), data(GIB))),
    "a tensor by numbers": lambda: legacy(call(name("torch", "FloatTensor"), data(1 << 15), data(1 << 15))),
    "a storage by number": lambda: legacy(call(name("torch.storage", "UntypedStorage"), data(4 * GIB))),
    "a parameter within a type": lambda: legacy(
        call(
            name("torch._tensor", "_rebuild_from_type_v2"),
            name("torch", "Tensor"),
            name("torch", "Tensor"),
            data((GIB,)),
            data({}),
        )
    ),
    "a state that grows": lambda: legacy(
        name("torch", "Tensor") + b")R" + arguments(storage(), data(0), data((GIB,)), data((1,))) + b"b"
    ),
    "a long text": lambda: legacy(b"X" + struct.pack("<I", 4 * GIB - 1)),
    "a far place in the memo": lambda: legacy(b"Nr" + struct.pack("<I", 4 * GIB - 1)),
    "an archive, a tensor by number": lambda: zipped(
        {"data.pkl": pickled(in_a_dict(call(name("torch", "Tensor"), data(GIB))), 2), "version": b"3\n"}
    ),
    "an archive, a byte array and a name that only torch knows": lambda: zipped(
        {
            "data.pkl": pickled(
                in_a_dict(name("torch", "FloatTensor") + b"0" + call(name("builtins", "bytearray"), data(4 * GIB))),
                2,
            ),
            "version": b"3\n",
        }
    ),
}


def open_with_little_memory(path: Path) -> str:
    """What becomes of opening a file, in a process that could not get what it asks for, and would say so."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + GIB, before[1]))
    try:
        with holdfast.open(path) as opened:
            return f"opened {sorted(opened)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_the_forged_files_are_good_ones_apart_from_what_is_forged(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(legacy(tensor()))
    assert_same(holdfast.open(tmp_path / "x.pt").read(), {"w": torch.tensor([1.0, 2.0])})


def open_all(folder: Path) -> dict[str, str]:
    return {path.name: open_with_little_memory(path) for path in sorted(folder.iterdir())}


def test_small_files_that_ask_for_gigabytes_are_refused_before_any_is_reserved(ranks: RankPool, tmp_path: Path) -> None:
    for attack, make in ATTACKS.items():
        (tmp_path / attack).write_bytes(make())
    (found,) = ranks(1).run(open_all, tmp_path, process_group=False)
    assert len(found) == len(ATTACKS)
    for attack, told in found.items():
        assert told.startswith("DamagedCheckpointError"), (attack, told)
        assert "alloc" not in told.lower(), (attack, told)
        assert attack in told


def states() -> dict[str, Any]:
    base = torch.arange(10.0)
    return {
        "tensors": {"a": base, "b": torch.ones(2, 3).T, "c": torch.ones(1).expand(1000, 1000), "d": torch.ones(0)},
        "views": {"a": base, "b": base[2:4], "c": base.view(2, 5)},
        "parameters": {"p": torch.nn.Parameter(torch.ones(3)), "bytes": bytearray(b"abc"), "empty": bytearray()},
        "values": {"n": 5, "t": (1, "x"), "f": 1e9, "huge": 10**30, "set": {1, 2}},
        "model": torch.nn.Linear(3, 4).state_dict(),
        "half": {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(3, dtype=torch.complex64)},
        "sparse": {"s": torch.eye(3).to_sparse()},
        "quantized": {"q": torch.quantize_per_tensor(torch.ones(50), 0.1, 0, torch.quint8)},
        "new types": {"a": torch.ones(7, dtype=torch.float8_e4m3fn), "b": torch.ones(7, dtype=torch.uint16)},
    }


@pytest.mark.parametrize("is_zip", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_what_torch_writes_is_never_refused(tmp_path: Path, is_zip: bool) -> None:
    for name_of_it, state in states().items():
        if name_of_it == "new types" and not is_zip:  # which torch writes, and cannot read itself
            continue
        torch.save(state, tmp_path / name_of_it, _use_new_zipfile_serialization=is_zip)
        assert list(holdfast.open(tmp_path / name_of_it).read()) == list(state)


@pytest.mark.parametrize("cut", [1, 8, 16, 30, 100])
def test_a_file_that_was_cut_off_is_damaged(tmp_path: Path, cut: int) -> None:
    (tmp_path / "x.pt").write_bytes(legacy(tensor())[:-cut])
    with pytest.raises(DamagedCheckpointError):
        holdfast.open(tmp_path / "x.pt")
