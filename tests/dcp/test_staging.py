"""The stagers of the drop-in, on a machine without an accelerator."""

from __future__ import annotations

import itertools
import threading
import warnings
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import staging as stock_staging

from holdfast.dcp import FileSystemWriter
from holdfast.dcp._state_dict_stager import StateDictStager
from holdfast.dcp.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
from holdfast.staging.arenas import shared_arena_of

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")


def state(value: float = 1.0) -> dict[str, Any]:
    return {"weight": torch.full((3,), value), "scalar": torch.tensor(value), "list": [value]}


def settled(staged: Any) -> dict[str, Any]:
    return staged.result() if isinstance(staged, Future) else staged


@pytest.mark.parametrize("options", list(itertools.product([False, True], repeat=4)), ids=str)
def test_every_option_works_and_what_cannot_be_had_is_said_once(options: tuple[bool, ...]) -> None:
    config = StagingOptions(*options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stager = DefaultStager(config)
        for value in (1.0, 2.0):
            source = state(value)
            staged = stager.stage(source)
            assert isinstance(staged, Future) == config.use_async_staging
            private = settled(staged)
            source["weight"].fill_(9)
            source["list"].append(9)
            assert private["weight"].tolist() == [value] * 3
            assert private["list"] == [value]
            assert (shared_arena_of(private["weight"]) is not None) == config.use_shared_memory
        stager.close()
    unavailable = config.use_pinned_memory or config.use_non_blocking_copy
    assert ["need an accelerator" in str(warning.message) for warning in caught] == [True] * unavailable


def test_a_default_stager_needs_no_accelerator() -> None:
    with pytest.warns(UserWarning, match="need an accelerator"):
        stager = DefaultStager()
    assert settled(stager.stage(state()))["list"] == [1.0]
    stager.close()


NO_FRILLS = StagingOptions(False, False, False, False)
STAGERS = {
    "DefaultStager": lambda: DefaultStager(NO_FRILLS),
    "DefaultStager in a thread": lambda: DefaultStager(StagingOptions(False, False, True, False)),
    "BlockingAsyncStager": lambda: BlockingAsyncStager(cache_staged_state_dict=True),
    "StateDictStager": StateDictStager,
    "StateDictStager, shared": lambda: StateDictStager(share_memory=True),
}


@pytest.mark.parametrize("name", STAGERS)
def test_memory_is_reused_when_the_copy_is_gone_and_not_before(name: str) -> None:
    stager = STAGERS[name]()
    first = settled(stager.stage(state(1.0)))
    second = settled(stager.stage(state(2.0)))
    assert first["weight"].tolist() == [1.0] * 3
    addresses = {first["weight"].data_ptr(), second["weight"].data_ptr()}
    assert len(addresses) == 2
    del first, second
    assert settled(stager.stage(state(3.0)))["weight"].data_ptr() in addresses
    stager.close()


def test_the_process_keeps_one_block_for_stagers_that_keep_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def address() -> int:
        stager = BlockingAsyncStager()
        staged = stager.stage({"weight": torch.ones(100_000)})
        stager.close()
        return int(staged["weight"].data_ptr())

    kept = address()
    assert [address(), address()] == [kept, kept]
    monkeypatch.setenv("HOLDFAST_KEEP_STAGING_MEMORY", "0")
    in_use = BlockingAsyncStager().stage({"weight": torch.ones(100_000)})
    assert in_use["weight"].data_ptr() != kept


def test_states_may_change_between_saves() -> None:
    stager = BlockingAsyncStager(cache_staged_state_dict=True)
    assert stager.stage({"a": torch.zeros(2)})["a"].tolist() == [0, 0]
    assert stager.stage({"b": torch.ones(5), "c": {1: "new"}})["b"].tolist() == [1] * 5


@pytest.mark.parametrize("name", ["DefaultStager", "DefaultStager in a thread", "StateDictStager"])
def test_a_closed_stager_says_that_it_is(name: str) -> None:
    stager = STAGERS[name]()
    kept = settled(stager.stage(state()))
    stager.close()
    stager.close()
    with pytest.raises(RuntimeError, match="closed"):
        stager.stage(state())
    assert kept["weight"].tolist() == [1.0] * 3


@pytest.mark.parametrize("name", STAGERS)
def test_a_failure_to_stage_is_raised_where_it_happens(name: str) -> None:
    class Odd:
        def __deepcopy__(self, memo: Any) -> Any:
            raise OSError("no copy")

    stager = STAGERS[name]()
    with pytest.raises(TypeError, match=r"'a\.b'"):
        stager.stage({"a": {"b": Odd()}})


def test_waiting_for_staging_returns_when_it_is_complete() -> None:
    stager = DefaultStager(StagingOptions(False, False, True, False))
    staged = stager.stage({"weight": torch.ones(1_000_000)})
    stager.synchronize_staging()
    assert staged.done()
    stager.close()


def test_unusual_values_are_refused_on_request() -> None:
    stager = BlockingAsyncStager(type_check=True)
    stager.stage({"ok": [1, "text", None, {"t": torch.ones(1)}]})
    with pytest.raises(ValueError, match=r"Unexpected value type .*set.* at 'a\.1'"):
        stager.stage({"a": [1, {2}]})
    BlockingAsyncStager().stage({"a": [1, {2}]})


def test_the_protocol_is_structural_as_in_stock() -> None:
    class Foreign:
        _synchronize_after_execute = True
        should_synchronize_after_execute = True

        def stage(self, state_dict: Any) -> Any:
            return state_dict

        def synchronize_staging(self) -> None: ...

        def close(self) -> None: ...

    class WithoutClose:
        _synchronize_after_execute = True
        should_synchronize_after_execute = True

        def stage(self, state_dict: Any) -> Any:
            return state_dict

        def synchronize_staging(self) -> None: ...

    for protocol in (AsyncStager, stock_staging.AsyncStager):
        assert isinstance(Foreign(), protocol)
        assert not (hasattr(protocol, "close") and isinstance(WithoutClose(), protocol))  # older stocks have none
        assert isinstance(BlockingAsyncStager(), protocol)
        assert isinstance(DefaultStager(NO_FRILLS), protocol)


def test_the_base_has_stocks_defaults() -> None:
    class Lazy(AsyncStager):
        pass

    assert Lazy().should_synchronize_after_execute
    with pytest.warns(FutureWarning, match="synchronize_staging"):
        Lazy().synchronize_staging()
    with pytest.raises(NotImplementedError, match="Lazy"):
        Lazy().stage({})
    assert not BlockingAsyncStager().should_synchronize_after_execute


def test_a_file_system_writer_is_a_stager(tmp_path) -> None:
    for cached in (False, True):
        writer = FileSystemWriter(tmp_path, cache_staged_state_dict=cached)
        assert isinstance(writer, BlockingAsyncStager)
        source = state(1.0)
        staged = writer.stage(source)
        source["weight"].fill_(9)
        assert staged["weight"].tolist() == [1.0] * 3
        assert writer.per_thread_copy_ahead == 10_000_000
        writer.close()


def test_a_state_dict_stager_does_without_pinned_memory() -> None:
    with pytest.warns(UserWarning, match="pinned memory need an accelerator"):
        stager = StateDictStager(pin_memory=True)
    assert stager.stage(state())["list"] == [1.0]


# StateDictStager, by which programs copy any state


def views() -> dict[str, Any]:
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "base": base,
        "rows": base[1:3],
        "columns": base[:, ::2],
        "turned": base.T,
        "bits": base.view(torch.int32),
        "parameter": torch.nn.Parameter(base[2], requires_grad=False),
        "wide": torch.ones(1).expand(1000),
        "apart": torch.arange(3.0),
        "nested": [{"one": base[3, 3:]}],
        "complex": torch.tensor([1 + 2j]).conj(),
        "empty": base[:0],
    }


def leaves(state: dict[str, Any]) -> list[torch.Tensor]:
    return [*(value for key, value in state.items() if key != "nested"), state["nested"][0]["one"]]


@pytest.mark.parametrize("shared", [False, True])
def test_views_of_one_memory_are_views_of_one_memory_in_the_copy(shared: bool) -> None:
    stager = StateDictStager(share_memory=shared)
    for _ in range(2):
        source = views()
        staged = stager.stage(source)

        for original, copied in zip(leaves(source), leaves(staged), strict=True):
            assert torch.equal(original, copied)
            assert original.stride() == copied.stride() or original.is_conj()
            assert type(original) is type(copied)
        source["base"].fill_(-1)
        assert staged["base"].flatten().tolist() == list(range(24))
        staged["base"][1:3] = 7
        assert staged["rows"].unique().tolist() == [7]
        assert staged["columns"][1].tolist() == [7, 7, 7]
        assert staged["turned"][:, 2].tolist() == [7] * 6
        assert staged["parameter"].tolist() == [7] * 6
        assert staged["bits"][1, 0] == torch.tensor(7.0).view(torch.int32)
        memory = {tensor.untyped_storage().data_ptr() for tensor in leaves(staged) if tensor.numel()}
        assert len(memory) == len({tensor.untyped_storage().data_ptr() for tensor in leaves(source) if tensor.numel()})
        assert staged["wide"].untyped_storage().nbytes() == 4
    stager.close()


def test_part_of_a_large_memory_is_copied_without_the_rest() -> None:
    large = torch.arange(100_000.0)

    staged = StateDictStager().stage({"a": large[50_001:50_011], "b": large[50_006:50_021]})

    assert staged["a"].tolist() == large[50_001:50_011].tolist()
    assert staged["a"].untyped_storage().nbytes() < 200
    staged["a"][5:] = 0
    assert staged["b"][:5].tolist() == [0] * 5


def test_attributes_that_were_set_on_tensors_are_kept() -> None:
    first, second = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    first.label, first.history, first.partner = "first", [1], second
    second.gradient, second.lock = torch.ones(3), threading.Lock()
    same = first[:]
    same.label = "the same"

    staged = StateDictStager().stage({"second": second, "first": first, "same": same, "again": first})

    copied = staged["first"]
    assert (copied.label, copied.history) == ("first", [1])
    assert copied.history is not first.history
    assert copied.partner is staged["second"]
    assert staged["second"].gradient.tolist() == [1, 1, 1]
    assert staged["second"].gradient.data_ptr() != second.gradient.data_ptr()
    assert staged["second"].lock is second.lock  # nobody can copy it
    assert staged["again"] is copied
    assert staged["same"].label == "the same"
    assert staged["same"].data_ptr() == copied.data_ptr()
