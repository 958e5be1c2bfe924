"""Every dtype of torch arrives bit by bit: whole and in shards, from us to us, to stock and from stock."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from holdfast.errors import HoldfastError
from tests.dcp.states import DIRECTIONS, bits, blank, differing, load, of_bytes, same_bits, save
from tests.rank_pool import RankPool
from tests.sharding import mesh_of_all_ranks
from tests.torches import copies

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:ComplexHalf", "ignore:TypedStorage", "ignore:torch.quantize_per"
)

ALL = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
WITH_STOCK = {
    name: ALL[name]
    for name in (
        *("float16", "float32", "float64", "bfloat16"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"),
        *("complex32", "complex64", "complex128", "bcomplex32"),
    )
    if name in ALL
}
# Stock cannot save these: torch knows no largest value of them.
OPAQUE = {name: ALL[name] for name in ("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2")}
LESS_THAN_A_BYTE = {
    name: ALL[name] for sign in ("", "u") for count in range(1, 8) if (name := f"{sign}int{count}") in ALL
}
QUANTIZED = {name: ALL[name] for name in ("quint8", "qint8", "qint32")}
WITHOUT_A_COPY_IN_TORCH = {"quint4x2", "quint2x4"}

SHAPE = (4, 6)


def pattern(dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """Bytes of all kinds: among floats there are NaNs with payloads, infinities and zeros of both signs."""
    count = shape[0] * shape[1] * dtype.itemsize
    data = (torch.arange(count, dtype=torch.int64) * 37).to(torch.uint8)
    special = torch.tensor([0, 0, 0, 0x80, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0x80, 0x7F, 0x7F, 0x7C, 0x80, 0x3F])
    data[: min(16, count)] = special[:count].to(torch.uint8)
    return of_bytes(data, dtype, shape)


def patterns(dtypes: dict[str, torch.dtype]) -> dict[str, torch.Tensor]:
    return {name: pattern(dtype) for name, dtype in dtypes.items()}


def blanks(dtypes: dict[str, torch.dtype]) -> dict[str, torch.Tensor]:
    return {name: blank(pattern(dtype)) for name, dtype in dtypes.items()}


def test_no_dtype_of_torch_is_forgotten():
    assert ALL.keys() == (WITH_STOCK | OPAQUE | LESS_THAN_A_BYTE | QUANTIZED).keys() | WITHOUT_A_COPY_IN_TORCH


def dtypes_between(saver: str, loader: str) -> dict[str, torch.dtype]:
    """Those that both libraries can handle. Stock needs torch to copy them, which older ones cannot all."""
    return {name: dtype for name, dtype in WITH_STOCK.items() if "stock" not in (saver, loader) or copies(dtype)}


@pytest.mark.parametrize(("saver", "loader"), DIRECTIONS)
def test_every_dtype_that_stock_can_save_arrives_bit_by_bit(tmp_path, saver, loader):
    dtypes = dtypes_between(saver, loader)
    save(saver, patterns(dtypes), tmp_path)
    state = blanks(dtypes)
    load(loader, state, tmp_path)
    assert differing(state, patterns(dtypes)) == []


@pytest.mark.parametrize(("saver", "loader"), DIRECTIONS)
def test_every_dtype_arrives_bit_by_bit_through_views(tmp_path, saver, loader):
    """A column-wise source and a column-wise destination, so that nothing is copied as one stretch of memory."""
    dtypes = dtypes_between(saver, loader)
    save(saver, {name: tensor.t() for name, tensor in patterns(dtypes).items()}, tmp_path)
    memory = blanks(dtypes)
    load(loader, {name: tensor.t() for name, tensor in memory.items()}, tmp_path)
    assert differing(memory, patterns(dtypes)) == []


def test_dtypes_that_stock_cannot_save_arrive_bit_by_bit(tmp_path):
    dtypes = OPAQUE | LESS_THAN_A_BYTE
    save("ours", {"whole": patterns(dtypes), "view": {k: t[:, ::2] for k, t in patterns(dtypes).items()}}, tmp_path)
    whole, memory = blanks(dtypes), blanks(dtypes)
    load("ours", {"whole": whole, "view": {k: t[:, ::2] for k, t in memory.items()}}, tmp_path)
    assert differing(whole, patterns(dtypes)) == []
    halves = {k: t[:, ::2] for k, t in memory.items()}
    assert differing(halves, {k: t[:, ::2] for k, t in patterns(dtypes).items()}) == []


def test_stock_loads_the_opaque_dtypes_that_it_cannot_save(tmp_path):
    save("ours", patterns(OPAQUE), tmp_path)
    state = blanks(OPAQUE)
    load("stock", state, tmp_path)
    assert differing(state, patterns(OPAQUE)) == []


# --- quantized -----------------------------------------------------------------------------------------------------


def quantized(dtype: torch.dtype, *, per_channel: bool, factor: float = 1.0, scale: float = 0.1) -> torch.Tensor:
    values = torch.arange(6.0).reshape(2, 3) * factor
    if per_channel:
        return torch.quantize_per_channel(values, torch.tensor([scale, 2 * scale]), torch.tensor([0, 0]), 0, dtype)
    return torch.quantize_per_tensor(values, scale, 3, dtype)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("saver", "loader"), DIRECTIONS)
def test_quantized_tensors_arrive(tmp_path, saver, loader, per_channel):
    save(saver, {k: quantized(dtype, per_channel=per_channel) for k, dtype in QUANTIZED.items()}, tmp_path)
    state = {k: quantized(dtype, per_channel=per_channel, factor=0) for k, dtype in QUANTIZED.items()}
    load(loader, state, tmp_path)
    for name, dtype in QUANTIZED.items():
        expected = quantized(dtype, per_channel=per_channel)
        assert torch.equal(state[name].int_repr(), expected.int_repr())
        assert torch.equal(state[name].dequantize(), expected.dequantize())


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("saver", ["ours", "stock"])
def test_a_quantized_tensor_of_another_scale_is_not_filled_with_integers_that_mean_something_else(
    tmp_path, saver, per_channel
):
    save(saver, {"weight": quantized(torch.qint8, per_channel=per_channel)}, tmp_path)
    state = {"weight": quantized(torch.qint8, per_channel=per_channel, factor=0, scale=0.7)}
    with pytest.raises(Exception, match="'weight' cannot be filled: it was saved with scale") as caught:
        load("ours", state, tmp_path)
    assert isinstance(caught.value.failures[0][0], HoldfastError)
    assert not state["weight"].dequantize().any()


# --- sharded -------------------------------------------------------------------------------------------------------


def sharded(full: torch.Tensor, dim: int) -> DTensor:
    """This rank's part of `full`, without a single operation of DTensor on it, which knows few dtypes."""
    mesh = mesh_of_all_ranks()
    size = -(-full.shape[dim] // dist.get_world_size())
    local = full[(slice(None),) * dim + (slice(size * dist.get_rank(), size * (dist.get_rank() + 1)),)]
    shape, stride = full.shape, torch.empty(full.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)


def reshard_all(path, saver, loader, names):
    """Save row-wise, load column-wise; also a plain copy on every rank. The keys that did not arrive."""
    dtypes = {name: ALL[name] for name in names}
    full = patterns(dtypes)
    save(saver, {"rows": {k: sharded(t, 0) for k, t in full.items()}, "plain": full}, path)
    state = {"rows": {k: sharded(blank(t), 1) for k, t in full.items()}, "plain": blanks(dtypes)}
    load(loader, state, path)
    expected = {k: sharded(t, 1).to_local() for k, t in full.items()}
    found = {k: t.to_local() for k, t in state["rows"].items()}
    return [k for k in names if bits(found[k]) != bits(expected[k])], differing(state["plain"], full)


@pytest.mark.parametrize(("saver", "loader"), DIRECTIONS)
def test_every_dtype_is_resharded_bit_by_bit(ranks: RankPool, tmp_path, saver, loader):
    assert ranks(2).run(reshard_all, tmp_path, saver, loader, list(dtypes_between(saver, loader))) == [([], [])] * 2


def test_dtypes_that_stock_cannot_save_are_resharded_bit_by_bit(ranks: RankPool, tmp_path):
    names = [*OPAQUE, *LESS_THAN_A_BYTE]
    assert ranks(2).run(reshard_all, tmp_path, "ours", "ours", names) == [([], [])] * 2


def test_same_bits_tells_apart_what_compares_equal():
    """The measure of this file: it would prove nothing if it took 0.0 for -0.0."""
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.tensor([1], dtype=torch.int32), torch.tensor([1.0]))
    assert same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
