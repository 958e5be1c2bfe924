"""Malicious archives: descriptions that lie about their bytes, and directories that lie about their entries."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import pytest
import torch

from holdfast._formats.dcp.archive import describe_tensor, read_directory, read_tensor
from holdfast.errors import DamagedCheckpointError, RefusedPickleError
from tests.attacks.forging import (
    CODE,
    HARMFUL,
    Bait,
    arguments,
    assert_refused,
    bait,  # noqa: F401  # a fixture
    call,
    data,
    name,
    pickled,
    text,
)
from tests.formats.dcp.blobs import our_blob, torch_blob, zipped

NO_HOOKS = name("collections", "OrderedDict") + b")R"
PAYLOAD = bytes(range(24))


def storage(cls: str = "FloatStorage", key: str = "0", count: int = 6, location: str = "cpu") -> bytes:
    module = "torch.storage" if cls == "UntypedStorage" else "torch"
    return arguments(text("storage"), name(module, cls), text(key), text(location), data(count)) + b"Q"


def tensor(offset: Any = 0, sizes: Any = (2, 3), strides: Any = (3, 1), *more: bytes, of: bytes | None = None) -> bytes:
    return call(
        name("torch._utils", "_rebuild_tensor_v2"),
        storage() if of is None else of,
        data(offset),
        data(sizes),
        data(strides),
        data(False),
        *(more or (NO_HOOKS,)),
    )


def blob_of(program: bytes) -> bytes:
    """An archive with right CRCs: an attacker can compute them too."""
    return zipped({"data.pkl": pickled(program, 2), "version": b"3\n", "byteorder": b"little", "data/0": PAYLOAD})


def read(program: bytes) -> torch.Tensor:
    return read_tensor(bytearray(blob_of(program)), source="file", key="key")


def test_the_forged_archives_are_good_ones_apart_from_what_is_forged() -> None:
    assert read(tensor()).shape == (2, 3)
    assert bytes(read(tensor()).view(torch.uint8).flatten().numpy()) == PAYLOAD


@pytest.mark.parametrize("attack", CODE)
def test_code_is_refused_by_name_and_does_not_run(attack: str, bait: Bait) -> None:  # noqa: F811
    for program in (
        CODE[attack](bait),
        tensor(0, (1,), (1,), CODE[attack](bait)),
        CODE[attack](bait) + b"0" + tensor(),
    ):
        assert_refused(RefusedPickleError, lambda program=program: read(program), bait)


@pytest.mark.parametrize("attack", HARMFUL)
def test_misuse_of_what_is_allowed_is_damage(attack: str) -> None:
    assert_refused(DamagedCheckpointError, lambda: read(HARMFUL[attack] + b"0" + tensor()))


LIES: dict[str, bytes] = {
    "a size beyond the storage": tensor(0, (7,), (1,)),
    "a stride beyond the storage": tensor(0, (2,), (6,)),
    "an offset beyond the storage": tensor(1),
    "an offset of one too many": tensor(6, (1,), (1,)),
    "a negative offset": tensor(-1),
    "a negative size": tensor(0, (-1, 3)),
    "a negative stride": tensor(0, (2, 3), (-3, 1)),
    "sizes whose product overflows": tensor(0, (1 << 32, 1 << 32), (0, 0)),
    "a size that overflows": tensor(0, (1 << 63,), (0,)),
    "a stride that overflows": tensor(0, (2,), (1 << 62,)),
    "an offset that overflows": tensor(1 << 62, (0,), (1,)),
    "a number beyond 64 bits": tensor(0, (1 << 70,), (1,)),
    "more strides than sizes": tensor(0, (2, 3), (3, 1, 1)),
    "sizes that are no tuple": tensor(0, 6, (1,)),
    "sizes that are texts": tensor(0, ("2", "3")),
    "sizes that are bools": tensor(0, (True, True)),
    "an offset that is a float": tensor(0.0),
    "a hook": tensor(0, (2, 3), (3, 1), b"}" + data("a") + data("b") + b"s"),
    "hooks of another type": tensor(0, (2, 3), (3, 1), data([1])),
    "unknown marks": tensor(0, (2, 3), (3, 1), NO_HOOKS, data({"os": 1})),
    "marks of another type": tensor(0, (2, 3), (3, 1), NO_HOOKS, data({"conj": 1})),
    "too many arguments": tensor(0, (2, 3), (3, 1), NO_HOOKS, b"N", b"N"),
    "a storage that claims more": tensor(of=storage(count=1 << 40)),
    "a storage that claims a little more": tensor(of=storage(count=7)),
    "a storage that claims less": tensor(0, (2,), (1,), of=storage(count=2)),
    "a storage of wider elements": tensor(of=storage("DoubleStorage")),
    "a storage of a negative size": tensor(0, (0,), (1,), of=storage(count=-6)),
    "a storage of a text as size": tensor(
        of=arguments(text("storage"), name("torch", "FloatStorage"), text("0"), text("cpu"), text("6")) + b"Q"
    ),
    "a storage of another kind": tensor(
        of=arguments(text("module"), name("torch", "FloatStorage"), text("0"), text("cpu"), data(6)) + b"Q"
    ),
    "a storage of a class that is none": tensor(
        of=arguments(text("storage"), name("torch", "float32"), text("0"), text("cpu"), data(6)) + b"Q"
    ),
    "a storage that is not there": tensor(of=storage(key="1")),
    "a storage elsewhere": tensor(of=storage(key="../../etc/passwd")),
    "the description as storage": tensor(of=storage(key="../data.pkl")),
    "a reference that is a text": tensor(of=text("0") + b"Q"),
    "a number as storage": tensor(of=data(5)),
    "a tensor as storage": tensor(of=tensor()),
    "a storage without a dtype": tensor(of=storage("UntypedStorage", count=24)),
    "a dtype wider than the storage": call(
        name("torch._utils", "_rebuild_tensor_v3"),
        storage("UntypedStorage", count=24),
        *map(data, (0, (6,), (1,), False)),
        NO_HOOKS,
        name("torch", "float64"),
    ),
    "a dtype that needs scales": call(
        name("torch._utils", "_rebuild_tensor_v3"),
        storage("UntypedStorage", count=24),
        *map(data, (0, (6,), (1,), False)),
        NO_HOOKS,
        name("torch", "quint4x2"),
    ),
    "a dtype that is a text": call(
        name("torch._utils", "_rebuild_tensor_v3"),
        storage("UntypedStorage", count=24),
        *map(data, (0, (6,), (1,), False)),
        NO_HOOKS,
        data("float32"),
    ),
    "a parameter of a number": call(name("torch._utils", "_rebuild_parameter"), data(5), data(True), NO_HOOKS),
    "a parameter of a storage": call(name("torch._utils", "_rebuild_parameter"), storage(), data(True), NO_HOOKS),
    "an attribute in the place of a method": call(
        name("torch._utils", "_rebuild_parameter_with_state"), tensor(), data(True), NO_HOOKS, data({"backward": 1})
    ),
    "an attribute in the place of the class": call(
        name("torch._tensor", "_rebuild_from_type_v2"),
        name("torch._utils", "_rebuild_tensor_v2"),
        name("torch", "Tensor"),
        b")",
        data({"__class__": 1}),
    ),
    "a tensor of a type that is none": call(
        name("torch._tensor", "_rebuild_from_type_v2"),
        name("torch._utils", "_rebuild_tensor_v2"),
        name("torch", "float32"),
        arguments(storage(), *map(data, (0, (2, 3), (3, 1), False)), NO_HOOKS),
        data({}),
    ),
    "a tensor made by something else": call(
        name("torch._tensor", "_rebuild_from_type_v2"),
        name("collections", "OrderedDict"),
        name("torch", "Tensor"),
        b")",
        data({}),
    ),
    "a tensor made by its class": call(name("torch", "Tensor"), data(1 << 40)),
    "a parameter made by its class": call(name("torch.nn.parameter", "Parameter"), data(5)),
    "a storage made by its class": call(name("torch", "FloatStorage"), data(1 << 40)),
    "a state for a tensor": tensor() + data({"data": 1}) + b"b",
    "items for a tensor": tensor() + data(0) + data(1) + b"s",
    "a quantized tensor without a scale": call(
        name("torch._utils", "_rebuild_qtensor"),
        storage("QUInt8Storage", count=24),
        *map(data, (0, (24,), (1,))),
        arguments(name("torch", "per_tensor_affine"), data("x"), data(0)),
        data(False),
        NO_HOOKS,
    ),
    "a quantized tensor of plain numbers": call(
        name("torch._utils", "_rebuild_qtensor"),
        storage(),
        *map(data, (0, (6,), (1,))),
        arguments(name("torch", "per_tensor_affine"), data(1.0), data(0)),
        data(False),
        NO_HOOKS,
    ),
    "a quantized tensor with too few scales": call(
        name("torch._utils", "_rebuild_qtensor"),
        storage("QInt8Storage", count=24),
        *map(data, (0, (24,), (1,))),
        arguments(
            name("torch", "per_channel_affine"),
            tensor(0, (1,), (1,), of=storage("DoubleStorage", count=3)),
            tensor(0, (1,), (1,), of=storage("LongStorage", count=3)),
            data(0),
        ),
        data(False),
        NO_HOOKS,
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_description_that_does_not_fit_its_bytes_is_damage(lie: str) -> None:
    assert_refused(DamagedCheckpointError, lambda: read(LIES[lie]))


def test_a_view_of_many_elements_on_one_costs_nothing_to_make() -> None:
    # torch saves expanded tensors like that. Whoever copies it pays; making it reserves no memory.
    record = describe_tensor(pickled(tensor(0, (1 << 50,), (0,)), 2), source="file")
    assert record.sizes == (1 << 50,)
    assert read(tensor(0, (1 << 50,), (0,))).shape == (1 << 50,)


def test_the_same_description_is_checked_against_each_archive_anew() -> None:
    assert read(tensor()).shape == (2, 3)
    short = zipped({"data.pkl": pickled(tensor(), 2), "version": b"3\n", "data/0": PAYLOAD[:-1]})
    assert_refused(DamagedCheckpointError, lambda: read_tensor(short, source="file", key="key"))


# Directories

LOCAL, CENTRAL, END = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s4H2IH")


def directory(blob: bytes) -> Any:
    return read_directory(lambda offset, length: blob[offset : offset + length], len(blob), source="file", key="key")


def changed(blob: bytes, entry: str, field: int, value: int, *, local: bool = False) -> bytes:
    """A blob with one number of one entry's header replaced."""
    form, magic = (LOCAL, b"PK\x03\x04") if local else (CENTRAL, b"PK\x01\x02")
    at = -1
    while True:
        at = blob.index(magic, at + 1)
        if blob[at + form.size :].startswith(f"archive/{entry}".encode()):
            break
    numbers = list(form.unpack_from(blob, at))
    numbers[field] = value
    return blob[:at] + form.pack(*numbers) + blob[at + form.size :]


CRC, PACKED, LENGTH, NAMES, EXTRAS, DISK, POSITION = 7, 8, 9, 10, 11, 13, 16
METHOD, FLAGS = 4, 3

DIRECTORY_LIES: dict[str, Any] = {
    "an entry beyond the end": lambda blob: changed(blob, "data/0", POSITION, len(blob) - 5),
    "an entry far beyond the end": lambda blob: changed(blob, "data/0", POSITION, 0xFFFFFFF0),
    "an entry in the place of another": lambda blob: changed(blob, "data/0", POSITION, 0),
    "an entry in the middle of nowhere": lambda blob: changed(blob, "data/0", POSITION, 3),
    "an entry that is too long": lambda blob: changed(changed(blob, "data/0", LENGTH, 5000), "data/0", PACKED, 5000),
    "an entry that is far too long": lambda blob: changed(
        changed(blob, "data/0", LENGTH, 0xFFFFFFF0), "data/0", PACKED, 0xFFFFFFF0
    ),
    "a large entry without a size": lambda blob: changed(blob, "data/0", LENGTH, 0xFFFFFFFF),
    "two different lengths": lambda blob: changed(blob, "data/0", LENGTH, 7),
    "a name that is too long": lambda blob: changed(blob, "data/0", NAMES, 60_000),
    "a name that is too short": lambda blob: changed(blob, "data/0", NAMES, 3),
    "an extra field that is too long": lambda blob: changed(blob, "data/0", EXTRAS, 60_000),
    "another disk": lambda blob: changed(blob, "data/0", DISK, 1),
    "a compressed entry": lambda blob: changed(blob, "data/0", METHOD, 8),
    "an encrypted entry": lambda blob: changed(blob, "data/0", FLAGS, 0x0809),
    "a local header with another name": lambda blob: blob.replace(b"archive/data/0", b"archive/data/1", 1),
    "a local header with another name length": lambda blob: changed(blob, "data/0", 9, 13, local=True),
    "a local header with a long extra field": lambda blob: changed(blob, "data/0", 10, 60_000, local=True),
    "a local header that is compressed": lambda blob: changed(blob, "data/0", 3, 8, local=True),
    "a file in another folder": lambda blob: blob.replace(b"archive/data/0", b"archivf/data/0"),
    "a file name that is no text": lambda blob: blob.replace(
        b"archive/version", b"archive/\xff\xfe\xff\xfe\xff\xfe\xff"
    ),
}


@pytest.mark.parametrize("lie", DIRECTORY_LIES)
@pytest.mark.parametrize("writer", [our_blob, torch_blob])
def test_a_directory_that_lies_is_damage(lie: str, writer: Any) -> None:
    blob = writer(torch.arange(4))
    forged = DIRECTORY_LIES[lie](blob)
    assert forged != blob
    assert_refused(DamagedCheckpointError, lambda: directory(forged))


def test_two_entries_of_the_same_name_are_damage() -> None:
    blob = zipped({"data.pkl": b"x", "data/0": b"a", "data/1": b"b"})
    assert len(directory(blob)) == 3
    assert_refused(DamagedCheckpointError, lambda: directory(blob.replace(b"data/1", b"data/0")))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (1, 1),  # number of this disk
        (2, 1),
        (3, 3),  # entries on this disk
        (4, 60_000),
        (5, 0xFFFFFFF0),  # size of the directory
        (5, 3),
        (6, 0xFFFFFFF0),  # its position
        (6, 0),
        (6, 0xFFFFFFFF),  # "see the 64-bit record", which is not there
        (7, 5),  # length of a comment
    ],
)
def test_an_end_record_that_lies_is_damage(field: int, value: int) -> None:
    blob = our_blob(torch.arange(4))
    numbers = list(END.unpack_from(blob, len(blob) - END.size))
    numbers[field] = value
    if field == 4:
        numbers[3] = value
    forged = blob[: -END.size] + END.pack(*numbers)
    assert_refused(DamagedCheckpointError, lambda: directory(forged))


def test_a_forged_64_bit_record_reserves_nothing() -> None:
    blob = torch_blob(torch.arange(4))
    at = blob.index(b"PK\x06\x06")
    record = struct.Struct("<4sQ2H2I4Q")
    numbers = list(record.unpack_from(blob, at))
    end = END.pack(b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    for size, position in [(1 << 62, 0), (1 << 40, 100), (0, 1 << 62), (1 << 63, 1 << 63)]:
        forged = record.pack(*numbers[:-2], size, position)
        whole = blob[:at] + forged + blob[at + record.size : -END.size] + end
        assert_refused(DamagedCheckpointError, lambda whole=whole: directory(whole))
    good = blob[: -END.size] + end
    assert directory(good) == directory(blob)


def test_a_file_that_ends_while_it_is_read_is_damage() -> None:
    blob = our_blob(torch.zeros(5000))
    short = blob[:-30]
    with pytest.raises(DamagedCheckpointError, match="cut off"):
        read_directory(lambda offset, length: short[offset : offset + length], len(blob), source="file", key="key")


def test_swapped_archives_are_not_told_apart_here_but_their_crcs_are() -> None:
    first, second = torch_blob(torch.arange(4)), torch_blob(torch.arange(4) + 1)
    entry, other = directory(first)["data/0"], directory(second)["data/0"]
    assert entry[:2] == other[:2]
    mixed = (
        first[: entry.offset]
        + second[entry.offset : entry.offset + entry.length]
        + first[entry.offset + entry.length :]
    )
    assert entry.crc == zlib.crc32(first[entry.offset : entry.offset + entry.length])
    assert_refused(DamagedCheckpointError, lambda: read_tensor(mixed, source="file", key="key"))
