"""Records of saves and loads: the same events as stock's, in the same order, on the same logger."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import logger as stock_logger
from torch.distributed.checkpoint import logging_handlers as stock_handlers

import holdfast.dcp as dcp
from holdfast.dcp import logger as our_logger
from holdfast.dcp import logging_handlers, utils
from holdfast.dcp.logger import _dcp_logger, _dcp_method_logger, _get_msg_dict, _init_logger
from holdfast.errors import CheckpointException
from holdfast.events import recorded_step
from tests.torches import says

STOCK, OURS = "torch.distributed.checkpoint", "holdfast.dcp"


class _Keep(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[int, dict[str, Any]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        assert isinstance(record.msg, dict)
        self.records.append((record.levelno, dict(record.msg)))  # stock changes its dict later

    def events(self) -> list[tuple[int, str, str]]:
        return [(level, message["func_name"], message["event"]) for level, message in self.records]


@contextmanager
def kept() -> Iterator[_Keep]:
    handler = _Keep()
    _dcp_logger.addHandler(handler)
    try:
        yield handler
    finally:
        _dcp_logger.removeHandler(handler)


# --- the same events as stock ------------------------------------------------------------------------------------


class _Broken:
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no state today")

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def act(library: str, what: str, path: Path) -> tuple[list[Any], list[Any]]:
    """Events and records of one call."""
    module = importlib.import_module(library)
    state: dict[str, Any] = {"tensor": torch.ones(3), "module": torch.nn.Linear(2, 2), "value": 2}
    actions = {
        "save": lambda: module.save(state, checkpoint_id=path),
        "load": lambda: module.load(state, checkpoint_id=path),
        "save alone": lambda: module.save(state, checkpoint_id=path, no_dist=True),
        "save with a writer and a planner": lambda: module.save(
            state, storage_writer=module.FileSystemWriter(path), planner=module.DefaultSavePlanner()
        ),
        "load with a reader and a planner": lambda: module.load(
            state, storage_reader=module.FileSystemReader(path), planner=module.DefaultLoadPlanner()
        ),
        "each for itself": lambda: module.save(state, checkpoint_id=path, use_collectives=False),
        "load what is not there": lambda: module.load({"other": torch.ones(2)}, checkpoint_id=path),
        "save what raises": lambda: module.save({"tensor": torch.ones(2), "broken": _Broken()}, checkpoint_id=path),
        "async_save": lambda: module.async_save(state, checkpoint_id=path).result(),
    }
    with kept() as handler, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            actions[what]()
        except (Exception, importlib.import_module(f"{library}.api").CheckpointException):
            if "not there" not in what and "raises" not in what:
                raise
    return handler.events(), handler.records


ACTIONS = [
    "save",
    "load",
    "save with a writer and a planner",
    "load with a reader and a planner",
    "load what is not there",
    "save what raises",
]


SAVER = "torch.distributed.checkpoint.state_dict_saver"
NOT_RECORDED = {
    *(() if says(SAVER, 'f"_stateful_to_state_dict.{key}"') else ("_stateful_to_state_dict",)),
    *(name for name in ("stage_state_dict", "maybe_synchronize_staging") if not says(SAVER, f"def {name}(")),
}
"""What older stocks do without a record."""


def of_stock(name: str) -> bool:
    return name.partition(".")[0] not in NOT_RECORDED


def compare(ours: tuple[list[Any], list[Any]], stock: tuple[list[Any], list[Any]]) -> None:
    events = [event for event in ours[0] if of_stock(event[1])]
    assert events == stock[0]
    assert events
    records = [(level, record) for level, record in ours[1] if of_stock(record["func_name"])]
    times = {"uuid", "time", "times_spent", "error", "checkpoint_id"}
    for (_, record), (_, expected) in zip(records, stock[1], strict=True):
        assert record.keys() == expected.keys()
        assert {k: v for k, v in record.items() if k not in times} == {
            k: v for k, v in expected.items() if k not in times
        }
        assert (record["checkpoint_id"] is None) == (expected["checkpoint_id"] is None)
        assert {k: type(v) for k, v in record.items()} == {k: type(v) for k, v in expected.items()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_events_and_fields_are_those_of_stock_on_every_rank(ranks, tmp_path, world_size):
    for what in [*ACTIONS, "each for itself"]:
        results = {}
        for library in (STOCK, OURS):
            path = tmp_path / library / ("own" if what == "each for itself" else "all")
            results[library] = ranks(world_size).run(act, library, what, path)
        for ours, stock in zip(results[OURS], results[STOCK], strict=True):
            compare(ours, stock)


def test_events_and_fields_are_those_of_stock_without_ranks(tmp_path):
    for what in [*ACTIONS, "save alone"]:
        compare(act(OURS, what, tmp_path / "ours"), act(STOCK, what, tmp_path / "stock"))


def test_a_background_save_records_the_call_and_the_save(ranks, tmp_path):
    """The two run at the same time, so only what belongs to one of them has an order."""
    for rank in range(2):
        ours = ranks(2).run(act, OURS, "async_save", tmp_path / "ours")[rank][0]
        stock = ranks(2).run(act, STOCK, "async_save", tmp_path / "stock")[rank][0]
        assert sorted(event for event in ours if of_stock(event[1])) == sorted(stock)
        for name in ("async_save", "stage_state_dict", "save", "write_data"):
            here = [event for event in ours if event[1] == name]
            assert here == [(logging.DEBUG, name, "start"), (logging.DEBUG, name, "end")]


def test_the_records_say_what_and_where(tmp_path):
    with kept() as handler:
        dcp.save({"a": 1}, storage_writer=dcp.FileSystemWriter(tmp_path), planner=dcp.DefaultSavePlanner())
    first, last = handler.records[0][1], handler.records[-1][1]
    assert first["checkpoint_id"] == str(tmp_path)
    assert (first["storage_writer"], first["planner"]) == ("FileSystemWriter", "DefaultSavePlanner")
    assert first["uuid"] == last["uuid"]
    assert last["times_spent"] == last["time"] - first["time"] > 0
    of_steps = {record["func_name"]: record["checkpoint_id"] for _, record in handler.records}
    assert of_steps["write_data"] == of_steps["finish_checkpoint"] == str(tmp_path)


def test_a_failure_is_recorded_as_an_error_with_its_text(tmp_path):
    with kept() as handler, pytest.raises(CheckpointException):
        dcp.load({"a": 1}, checkpoint_id=tmp_path / "nothing")
    level, record = handler.records[-1]
    assert (level, record["func_name"], record["event"]) == (logging.ERROR, "load", "exception")
    assert "no checkpoint at" in record["error"]


# --- the logger --------------------------------------------------------------------------------------------------


def test_the_logger_is_the_one_that_handlers_for_stock_are_installed_on():
    assert our_logger._dcp_logger is stock_logger._dcp_logger
    assert our_logger.DCP_LOGGER_NAME == stock_logger.DCP_LOGGER_NAME == logging_handlers.DCP_LOGGER_NAME
    assert logging_handlers._log_handlers is stock_handlers._log_handlers


def test_the_modules_have_the_names_and_signatures_of_stock():
    for name, value in vars(stock_logger).items():
        if inspect.isfunction(value) and value.__module__ == stock_logger.__name__:
            assert list(inspect.signature(getattr(our_logger, name)).parameters) == list(
                inspect.signature(value).parameters
            )


def test_nothing_is_shown_by_default():
    assert not _dcp_logger.propagate
    own = [handler for handler in _dcp_logger.handlers if not type(handler).__module__.startswith("_pytest")]
    assert own
    assert all(isinstance(handler, logging.NullHandler) for handler in own)


PROGRAM = """
import logging, sys, tempfile
import torch.distributed.logging_handlers as handlers
handlers._log_handlers["dcp_logger"] = logging.StreamHandler(sys.stdout)
import holdfast.dcp as dcp
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="ROOT %(name)s %(message)s")
dcp.save({"a": 1}, checkpoint_id=tempfile.mkdtemp())
print("stock:", "torch.distributed.checkpoint.logger" in sys.modules)
"""


def test_a_handler_put_in_torchs_table_gets_all_records_once():
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    records = [line for line in shown if "func_name" in line]
    assert len([line for line in records if "'func_name': 'save'" in line]) == 2
    assert not [line for line in records if line.startswith("ROOT")]
    assert "stock: False" in shown  # the drop-in does without torch's own logger


def test_init_logger_leaves_the_root_logger_alone():
    """Stock's makes every library of the process talk, by setting the level of the root logger."""
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    ours = logging.getLogger("holdfast")
    level, handlers = ours.level, list(ours.handlers)
    try:
        _init_logger(3)
        _init_logger(3)
        assert (root.level, list(root.handlers)) == before
        (added,) = [handler for handler in ours.handlers if handler not in handlers]
        record = logging.LogRecord("holdfast.saving", logging.INFO, "", 0, "saved", (), None)
        assert added.format(record).startswith("[rank 3] ")
        assert ours.isEnabledFor(logging.INFO)
    finally:
        ours.setLevel(level)
        ours.handlers = handlers


# --- the decorator -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [our_logger, stock_logger], ids=["ours", "stock"])
@pytest.mark.parametrize("log_exceptions", [True, False])
def test_the_decorator_records_calls_and_failures(module, log_exceptions):
    @module._dcp_method_logger(log_exceptions=log_exceptions, checkpoint_id="some/path")
    def half(number: int, *, planner: Any = None) -> int:
        if number % 2:
            raise ValueError(f"{number} is odd")
        return number // 2

    with kept() as handler:
        assert half(4) == 2
        with pytest.raises(ValueError, match="3 is odd"):
            half(3, planner=object())
    expected = [(logging.DEBUG, "half", "start"), (logging.DEBUG, "half", "end"), (logging.DEBUG, "half", "start")]
    if log_exceptions:
        expected.append((logging.ERROR, "half", "exception"))
        assert handler.records[-1][1]["error"] == "3 is odd"
    assert handler.events() == expected
    assert {record["checkpoint_id"] for _, record in handler.records} == {"some/path"}
    assert handler.records[-1][1]["planner"] == "object"
    assert half.__name__ == "half"
    assert list(inspect.signature(half).parameters) == ["number", "planner"]


def test_arguments_with_the_names_of_fields_do_no_harm():
    @_dcp_method_logger()
    def odd(**named: Any) -> dict[str, Any]:
        return named

    arguments = {"name": 1, "log_exceptions": 2, "func_name": 3, "event": 4}
    assert odd(**arguments) == arguments


def test_steps_of_an_object_are_recorded_with_what_it_is_about():
    class Walk:
        about = None

        def __init__(self) -> None:
            self.about = {"checkpoint_id": "there"}

        @recorded_step("walk")
        def go(self, *, far: bool) -> bool:
            return far

    with kept() as handler:
        assert Walk().go(far=True)
    assert handler.events() == [(logging.DEBUG, "walk", "start"), (logging.DEBUG, "walk", "end")]
    assert handler.records[0][1]["checkpoint_id"] == "there"


def described() -> dict[str, Any]:
    group = dist.new_group([0, 1])
    return _get_msg_dict("f", process_group=group, checkpoint_id=Path("x"))


def test_records_describe_the_group(ranks):
    first, second = ranks(2).run(described)
    assert (first["backend"], first["group_size"], first["world_size"]) == ("gloo", "2", "2")
    assert (first["global_rank"], second["global_rank"]) == ("0", "1")
    assert first["checkpoint_id"] == "x"


def described_after_the_end_of_its_group() -> tuple[dict[str, Any], int]:
    group = dist.new_group([0, 1])
    dist.destroy_process_group(group)
    record = _get_msg_dict("f", process_group=group, checkpoint_id="x")
    return record, dist.get_rank()


def test_a_group_that_is_gone_is_no_error(ranks):
    for record, _ in ranks(2).run(described_after_the_end_of_its_group):
        assert (record["func_name"], record["checkpoint_id"]) == ("f", "x")


# --- profiles ----------------------------------------------------------------------------------------------------


def profiled(what: str, path: Path) -> None:
    utils.ENABLE_PROFILE = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            actions = {
                "save": functools.partial(dcp.save, {"a": 1}, checkpoint_id=path),
                "load": functools.partial(dcp.load, {"a": 0}, checkpoint_id=path),
                "save_state_dict": functools.partial(
                    dcp.save_state_dict, {"a": 1}, dcp.FileSystemWriter(path), no_dist=True
                ),
                "load_state_dict": functools.partial(
                    dcp.load_state_dict, {"a": 0}, dcp.FileSystemReader(path), no_dist=True
                ),
            }
            actions[what]()
    finally:
        utils.ENABLE_PROFILE = False


@pytest.mark.parametrize("what", ["save", "load", "save_state_dict", "load_state_dict"])
def test_a_profile_is_printed_without_a_group(tmp_path, capsys, what):
    """Stock raises a ValueError where there is no process group."""
    dcp.save({"a": 1}, checkpoint_id=tmp_path)
    capsys.readouterr()
    profiled(what, tmp_path)
    assert "function calls" in capsys.readouterr().out


def test_no_profile_is_printed_unless_it_is_asked_for(tmp_path, capsys):
    dcp.save({"a": 1}, checkpoint_id=tmp_path)
    assert capsys.readouterr().out == ""
