"""How an exception is packed on one rank and unpacked on another, whatever it is made of."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import _is_wrapped_exception as stock_is_wrapped_exception
from torch.distributed.checkpoint.api import _wrap_exception as stock_wrap_exception

from holdfast._ranks.failures import PackedFailure, is_wrapped_exception, pack_failure, unpack_failure, wrap_exception
from holdfast.errors import DamagedCheckpointError, RemoteError
from tests.properties import examples

BUILTIN = st.sampled_from([ValueError, RuntimeError, KeyError, OSError, KeyboardInterrupt, SystemExit])
ARGUMENTS = st.lists(st.text() | st.integers() | st.none(), max_size=2)


def raised(error: BaseException) -> BaseException:
    def deepest():
        raise error

    try:
        deepest()
    except BaseException as caught:
        return caught


def sent(error: BaseException):
    """The exception as another rank gets it."""
    packed = pack_failure(wrap_exception(raised(error)))
    return unpack_failure(pickle.loads(pickle.dumps(packed)))


@settings(max_examples=examples(50))
@given(kind=BUILTIN, arguments=ARGUMENTS)
def test_an_ordinary_exception_arrives_as_it_was_with_its_stack(kind, arguments):
    error, stack = sent(kind(*arguments))
    assert type(error) is kind
    assert error.args == kind(*arguments).args
    assert [frame.name for frame in stack] == ["raised", "deepest"]
    assert stack[-1].line == "raise error"


def test_an_error_with_fields_arrives_with_them():
    error, _ = sent(DamagedCheckpointError("broken", file="f", key="k", expected=1, found=2))
    assert (str(error), error.file, error.key, error.expected, error.found) == ("broken", "f", "k", 1, 2)


class HoldsAHandle(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.handle = lambda: None


class TakesOtherArguments(Exception):
    def __init__(self, code, detail):
        super().__init__(detail)


@pytest.mark.parametrize("error", [HoldsAHandle("it broke"), TakesOtherArguments(1, "it broke")], ids=repr)
def test_an_exception_that_cannot_travel_is_described_by_type_and_text(error):
    arrived, stack = sent(error)
    assert type(arrived) is RemoteError
    assert arrived.type_name == f"{__name__}.{type(error).__name__}"
    assert arrived.text == "it broke"
    assert arrived.type_name in str(arrived)
    assert "it broke" in str(arrived)
    assert [frame.name for frame in stack] == ["raised", "deepest"]


class WithoutText(HoldsAHandle):
    def __str__(self):
        raise RuntimeError("no text for you")


def test_an_exception_without_text_that_cannot_travel_is_described_by_type():
    arrived, _ = sent(WithoutText("it broke"))
    assert arrived.type_name.endswith("WithoutText")
    assert "cannot be shown" in arrived.text


@pytest.mark.parametrize("pickled", [b"", b"garbage", pickle.dumps("not an exception"), None])
def test_a_failure_that_cannot_be_rebuilt_is_described(pickled):
    arrived, _ = unpack_failure(PackedFailure(pickled, "some.Error", "it broke", []))
    assert (arrived.type_name, arrived.text) == ("some.Error", "it broke")


def test_wrapped_exceptions_are_recognized_here_and_by_stock_alike():
    error = raised(ValueError("it broke"))
    ours, stock = wrap_exception(error), stock_wrap_exception(error)
    assert ours[0] is stock[0]
    assert [(f.filename, f.lineno, f.name) for f in ours[1]] == [(f.filename, f.lineno, f.name) for f in stock[1]]
    values = [ours, stock, None, error, (error,), (error, None), (None, ours[1]), [error, ours[1]], (*ours, 1)]
    assert [is_wrapped_exception(value) for value in values] == [stock_is_wrapped_exception(value) for value in values]
    assert [is_wrapped_exception(value) for value in values[:3]] == [True, True, False]
