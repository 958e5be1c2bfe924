"""Errors: they carry fields, read well, are caught as what people expect, and travel between processes."""

from __future__ import annotations

import inspect
import pickle
import typing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import errors
from holdfast._ranks.failures import wrap_exception
from holdfast.errors import CheckpointException, HoldfastError
from tests.properties import examples

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, HoldfastError) and cls is not CheckpointException  # which is made as that of torch
]
every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)

FIELD_VALUES = st.recursive(
    st.none() | st.text() | st.integers() | st.sampled_from([torch.float32, torch.Size([2, 3])]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def fields_of(cls: type[HoldfastError]) -> list[str]:
    return [name for name in typing.get_type_hints(cls) if not name.startswith("_")]


@every_class
@settings(max_examples=examples(10))
@given(data=st.data())
def test_an_error_has_its_fields_and_its_message_and_keeps_both_when_it_travels(cls, data):
    message = data.draw(st.text())
    fields = {name: data.draw(FIELD_VALUES) for name in fields_of(cls)}
    error = cls(message, **fields)
    for same in (error, pickle.loads(pickle.dumps(error))):
        assert type(same) is cls
        assert str(same) == message
        assert {name: getattr(same, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (errors.CheckpointNotFoundError, FileNotFoundError),
        (errors.CheckpointExistsError, RuntimeError),
        (errors.StateMismatchError, RuntimeError),
        (errors.StateMismatchError, ValueError),
        (errors.ReplicaMismatchError, ValueError),
        (errors.InvalidPlanError, ValueError),
        (errors.UnsupportedTensorError, ValueError),
        (errors.IncompleteSaveError, RuntimeError),
        (errors.RankDisagreementError, RuntimeError),
    ],
)
def test_an_error_is_caught_as_the_builtin_that_programs_expect(cls, expected):
    with pytest.raises(expected):
        raise cls("the message")


@every_class
def test_each_error_says_in_its_documentation_which_fields_it_has(cls):
    of_all = [] if cls is HoldfastError else fields_of(HoldfastError)
    for name in fields_of(cls):
        assert name in of_all or f"``{name}``" in (cls.__doc__ or "")


@every_class
def test_fields_that_a_class_does_not_have_are_refused_by_name(cls):
    with pytest.raises(TypeError, match=rf"{cls.__name__} has no field colour, size; it has .*rank"):
        cls("the message", size=3, colour="red", **dict.fromkeys(fields_of(cls)))


def test_an_error_of_somebody_else_has_the_fields_that_it_annotates():
    class TiredError(errors.UnknownKeyError):
        hours: int

    error = TiredError("the message", hours=3, key="w", rank=2)
    assert (error.hours, error.key, error.rank) == (3, "w", 2)
    assert HoldfastError("the message").rank is None


def failures_of(*ranks: int):
    def fail(rank):
        raise ValueError(f"reason of {rank}")

    failures = {}
    for rank in ranks:
        try:
            fail(rank)
        except ValueError as error:
            failures[rank] = wrap_exception(error)
    return failures


def test_everything_that_is_raised_is_a_holdfast_error():
    assert issubclass(CheckpointException, HoldfastError)
    with pytest.raises(HoldfastError) as caught:
        raise CheckpointException("write", failures_of(1))
    assert (caught.value.message, caught.value.fields) == ("write", {})
    with pytest.raises(TypeError):
        CheckpointException("write", {}, rank=3)


@settings(max_examples=examples(20))
@given(ranks=st.lists(st.integers(0, 1000), unique=True, max_size=4))
def test_a_checkpoint_exception_shows_rank_traceback_and_reason_of_every_failure(ranks):
    error = CheckpointException("write", failures_of(*ranks))
    text = str(error)
    assert error.args[0] == "write"
    assert list(error.failures) == ranks
    for rank in ranks:
        shown = text.split(f"(RANK {rank})\n")[1]
        assert "in fail" in shown
        assert f"ValueError: reason of {rank}" in shown
    assert text.count("(RANK") == len(ranks)


def test_a_checkpoint_exception_without_a_stack_can_be_shown():
    error = CheckpointException("write", {3: (ValueError("reason"), None)})
    assert "(RANK 3)\nValueError: reason" in str(error)


def test_a_checkpoint_exception_keeps_everything_when_it_travels():
    error = CheckpointException("write", failures_of(1, 2))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is CheckpointException
    assert str(copy) == str(error)
    assert list(copy.failures) == [1, 2]
    assert copy.args[1] is copy.failures
