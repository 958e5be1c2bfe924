"""What `save` and `load` do with their arguments before anything is planned, and the shape of what they raise."""

from __future__ import annotations

import pickle
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock

import holdfast.dcp as dcp
from holdfast.dcp._storage_utils import _storage_setup
from holdfast.dcp.filesystem import FileSystem
from holdfast.dcp.state_dict_saver import _save_state_dict
from tests.ranks import RankPool


def state() -> dict[str, Any]:
    return {"weights": torch.arange(4.0), "step": 7}


def blank() -> dict[str, Any]:
    return {"weights": torch.zeros(4), "step": 0}


def warnings_of(call: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return caught


# The second positional argument


def test_a_second_positional_argument_is_the_storage_with_a_warning_at_the_callers_line(tmp_path: Path) -> None:
    (saved,) = warnings_of(lambda: dcp.save(state(), dcp.FileSystemWriter(tmp_path)))
    target = blank()
    (loaded,) = warnings_of(lambda: dcp.load(target, dcp.FileSystemReader(tmp_path)))

    assert target["step"] == 7
    assert [w.category for w in (saved, loaded)] == [UserWarning, UserWarning]
    assert "storage_writer" in str(saved.message)
    assert "storage_reader" in str(loaded.message)
    assert saved.filename == loaded.filename == __file__


def test_the_storage_given_twice_is_an_assertion_error(tmp_path: Path) -> None:
    writer, reader = dcp.FileSystemWriter(tmp_path), dcp.FileSystemReader(tmp_path)

    with pytest.raises(AssertionError, match="storage_writer"):
        dcp.save(state(), writer, storage_writer=writer)
    with pytest.raises(AssertionError, match="storage_reader"):
        dcp.load(blank(), reader, storage_reader=reader)


def test_three_positional_arguments_are_a_type_error_as_for_any_function(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="positional argument"):
        dcp.save(state(), dcp.FileSystemWriter(tmp_path), None)
    with pytest.raises(TypeError, match="positional argument"):
        dcp.load(blank(), dcp.FileSystemReader(tmp_path), None)


def test_an_unknown_keyword_is_a_type_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="coordinator_rank"):
        dcp.save(state(), checkpoint_id=tmp_path, coordinator_rank=0)


# The deprecated functions


def test_the_deprecated_functions_work_and_announce_their_end_with_a_future_warning(tmp_path: Path) -> None:
    saved = warnings_of(lambda: dcp.save_state_dict(state(), dcp.FileSystemWriter(tmp_path), no_dist=True))
    target = blank()
    loaded = warnings_of(lambda: dcp.load_state_dict(target, dcp.FileSystemReader(tmp_path), no_dist=True))

    assert torch.equal(target["weights"], torch.arange(4.0))
    assert target["step"] == 7
    assert [(w.category, w.filename) for w in (*saved, *loaded)] == [(FutureWarning, __file__)] * 2


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_deprecated_functions_need_a_group_unless_told_otherwise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="process group"):
        dcp.save_state_dict(state(), dcp.FileSystemWriter(tmp_path))
    with pytest.raises(ValueError, match="process group"):
        dcp.load_state_dict(blank(), dcp.FileSystemReader(tmp_path))


class ResetsCounted(dcp.FileSystemWriter):
    def __init__(self, path: Path) -> None:
        self.resets: list[Any] = []
        super().__init__(path)

    def reset(self, checkpoint_id: Any = None) -> None:
        self.resets.append(checkpoint_id)
        super().reset(checkpoint_id)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*holds a checkpoint")
def test_a_given_storage_is_reset_only_with_an_id_and_always_by_the_deprecated_functions(tmp_path: Path) -> None:
    writer = ResetsCounted(tmp_path / "a")

    dcp.save(state(), storage_writer=writer)
    assert writer.resets == []
    dcp.save(state(), storage_writer=writer, checkpoint_id=tmp_path / "b")
    assert writer.resets == [tmp_path / "b"]
    dcp.save_state_dict(state(), writer, no_dist=True)
    assert writer.resets == [tmp_path / "b", None]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*only pickle can rebuild")
def test_the_deprecated_functions_store_a_module_whole_as_a_value(tmp_path: Path) -> None:
    metadata = dcp.save_state_dict({"model": torch.nn.Linear(1, 1)}, dcp.FileSystemWriter(tmp_path), no_dist=True)

    assert {key: type(entry).__name__ for key, entry in metadata.state_dict_metadata.items()} == {
        "model": "BytesStorageMetadata"
    }


# Which storage


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_without_id_and_storage_the_message_says_that_one_is_needed() -> None:
    message = "`checkpoint_id` must be specified if storage_reader/storage_writer is None."
    for call in (dcp.save, dcp.load, stock.save, stock.load):
        for nothing in (None, ""):
            with pytest.raises(RuntimeError) as raised:
                call(state(), checkpoint_id=nothing)
            assert str(raised.value).replace("specificed", "specified") == message  # stock of torch 2.6


@pytest.mark.parametrize("call", [dcp.save, dcp.load])
def test_an_id_that_no_storage_takes_is_named(call: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match=r"Cannot detect which StorageReader or StorageWriter.*strange://bucket/run"):
        call(state(), checkpoint_id="strange://bucket/run")


def test_the_local_file_system_takes_the_paths_that_it_takes_in_stock(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystem as StockFileSystem

    for path in (
        tmp_path / "new",
        Path("relative"),
        str(tmp_path / "a" / "b"),
        "relative/below/here",
        "s3://bucket/key",
        "/",
        "/no-such-folder-at-the-root/x",
    ):
        expected = StockFileSystem.validate_checkpoint_id(path)
        assert FileSystem.validate_checkpoint_id(path) == expected, path
        assert dcp.FileSystemWriter.validate_checkpoint_id(path) == expected, path


def test_a_reader_is_found_for_a_path_that_cannot_be_written_to() -> None:
    # Stock demands the right to write below some ancestor, so archives on read-only mounts do not load by path.
    assert dcp.FileSystemReader.validate_checkpoint_id("/proc/self/archive")
    assert not dcp.FileSystemReader.validate_checkpoint_id("gs://bucket/archive")


def test_storage_setup_gives_the_kind_that_is_asked_for(tmp_path: Path) -> None:
    writer = _storage_setup(None, str(tmp_path / "w"))
    reader = _storage_setup(None, str(tmp_path / "r"), reader=True)

    assert type(writer) is dcp.FileSystemWriter
    assert writer.checkpoint_id == tmp_path / "w"
    assert type(reader) is dcp.FileSystemReader
    assert reader.checkpoint_id == tmp_path / "r"
    assert _storage_setup(reader, None, reader=True) is reader


# With and without a group


def test_without_a_group_one_process_saves_and_loads_without_a_word(tmp_path: Path) -> None:
    target = blank()

    assert warnings_of(lambda: dcp.save(state(), checkpoint_id=tmp_path)) == []
    assert warnings_of(lambda: dcp.load(target, checkpoint_id=tmp_path)) == []
    assert target["step"] == 7


def test_one_of_several_launched_processes_without_a_group_is_warned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")

    (caught,) = warnings_of(lambda: dcp.save(state(), checkpoint_id=tmp_path))

    # The part of the text that stock's warning has in common, which people filter by.
    assert str(caught.message).startswith(
        "torch.distributed is disabled, unavailable or uninitialized, "
        "assuming the intent is to save in a single process."
    )
    assert warnings_of(lambda: dcp.save(state(), checkpoint_id=tmp_path / "x", no_dist=True)) == []


def save_alone_in_a_group(folder: Path) -> list[str]:
    rank = dist.get_rank()
    dcp.save({"mine": torch.full((2,), float(rank))}, checkpoint_id=folder / str(rank), no_dist=True)
    target = {"mine": torch.zeros(2)}
    dcp.load(target, checkpoint_id=folder / str(rank), no_dist=True)
    assert target["mine"].tolist() == [rank, rank]
    return sorted(path.name for path in (folder / str(rank)).iterdir())


def test_no_dist_in_a_group_saves_each_process_by_itself(ranks: RankPool, tmp_path: Path) -> None:
    for names in ranks(2).run(save_alone_in_a_group, tmp_path):
        assert names[0] == ".metadata"
        assert [name.split("_")[2] for name in names[1:]] == ["0"]


def save_on_a_subgroup(folder: Path) -> Any:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    metadata = dcp.save({f"of {dist.get_rank()}": 1, "both": 2}, checkpoint_id=folder, process_group=group)
    return sorted(metadata.state_dict_metadata)


def test_a_subgroup_without_rank_0_saves_together(ranks: RankPool, tmp_path: Path) -> None:
    both = ["both", "of 1", "of 2"]
    assert ranks(3).run(save_on_a_subgroup, tmp_path) == [None, both, both]


class KeepsRole(dcp.FileSystemWriter):
    finished = False

    def finish(self, metadata: Any, results: Any) -> None:
        self.finished = True
        super().finish(metadata, results)


def save_with_coordinator_1(folder: Path) -> bool:
    writer = KeepsRole(folder)
    _save_state_dict(state(), writer, coordinator_rank=1)
    return writer.finished


def test_another_coordinator_than_rank_0_commits(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2).run(save_with_coordinator_1, tmp_path) == [False, True]


# What is raised


def raised_by(namespace: Any, path: Path) -> BaseException:
    target = {"weights": torch.zeros(4), "absent": torch.zeros(1)}
    with pytest.raises(namespace.CheckpointException) as raised:
        namespace.load(target, checkpoint_id=path)
    return raised.value


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_failure_has_the_shape_that_it_has_in_stock(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path)

    theirs, ours = raised_by(stock, tmp_path), raised_by(dcp, tmp_path)

    for error in (theirs, ours):
        assert error.args == ("plan", error.failures)
        assert list(error.failures) == [0]
        cause, stack = error.failures[0]
        assert isinstance(cause, RuntimeError)
        assert "Missing key in checkpoint state_dict: absent." in str(cause)
        assert type(stack) is traceback.StackSummary
        assert stack[-1].line is not None
    assert isinstance(ours, Exception)
    assert not isinstance(theirs, Exception)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_text_of_a_failure_is_laid_out_as_in_stock(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path)

    def outline(error: BaseException) -> list[str]:
        """The lines that programs look for in logs: all but the stack and the rest of the cause's message."""
        lines = str(error).splitlines()
        assert lines[2].startswith("  File ")
        return [line for line in lines if not line.startswith("  ")][:2]

    assert outline(raised_by(dcp, tmp_path)) == outline(raised_by(stock, tmp_path))
    assert str(raised_by(dcp, tmp_path)).splitlines()[:2] == [
        "CheckpointException ranks:dict_keys([0])",
        "Traceback (most recent call last): (RANK 0)",
    ]


def test_a_failure_can_be_pickled_with_everything_it_says(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path)
    error = raised_by(dcp, tmp_path)

    again = pickle.loads(pickle.dumps(error))

    assert str(again) == str(error)
    assert again.args[0] == "plan"


@pytest.mark.parametrize("step", ["plan", "write", "read"])
def test_failures_carry_the_name_of_the_step(tmp_path: Path, step: str) -> None:
    class Broken(dcp.DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            return 1 / 0 if step == "plan" else super().create_local_plan()

        def resolve_data(self, write_item: Any) -> Any:
            return 1 / 0 if step == "write" else super().resolve_data(write_item)

    class BrokenLoad(dcp.DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: Any) -> None:
            1 / 0  # noqa: B018

    def save_and_load() -> None:
        dcp.save(state(), checkpoint_id=tmp_path, planner=Broken())
        dcp.load(blank(), checkpoint_id=tmp_path, planner=BrokenLoad())

    with pytest.raises(dcp.CheckpointException, match="division by zero") as raised:
        save_and_load()

    assert raised.value.args[0] == step


def save_where_one_rank_cannot_find_its_storage(folder: Path) -> None:
    dcp.save(state(), checkpoint_id=folder if dist.get_rank() == 0 else "nowhere://x")


def test_an_argument_that_is_wrong_on_one_rank_does_not_leave_the_others_waiting(
    ranks: RankPool, tmp_path: Path
) -> None:
    fine, wrong = ranks(2).run_raw(save_where_one_rank_cannot_find_its_storage, tmp_path, group_timeout=20)

    assert wrong.error.type_name == "RuntimeError"
    assert fine.error.type_name == "CheckpointException"
    assert list(fine.error.exception.failures) == [1]
    assert "Cannot detect" in fine.error.message
    assert list(tmp_path.iterdir()) == []
