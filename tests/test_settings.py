"""Knobs: where their values come from, and what happens to values that make no sense."""

from __future__ import annotations

import threading
from dataclasses import fields

import pytest

from holdfast._dcp.load_planner import DefaultLoadPlanner
from holdfast._dcp.save_planner import DefaultSavePlanner
from holdfast._settings import Settings, current, override

BOOLS = [knob.name for knob in fields(Settings) if isinstance(getattr(Settings, knob.name), bool)]
NUMBERS = [knob.name for knob in fields(Settings) if isinstance(getattr(Settings, knob.name), float)]
TEXTS = [knob.name for knob in fields(Settings) if getattr(Settings, knob.name) == ""]
CHOICES = {"page_cache": ["auto", "use", "avoid"]}
FINDINGS = [knob.name for knob in fields(Settings) if knob.name not in [*BOOLS, *NUMBERS, *TEXTS, *CHOICES]]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for knob in fields(Settings):
        monkeypatch.delenv(f"HOLDFAST_{knob.name.upper()}", raising=False)


def test_by_default_pickles_are_refused_and_everything_is_checked():
    expected = Settings(
        allow_pickle=False,
        replica_mismatch="warn",
        dtype_change="warn",
        verify=True,
        keep_staging_memory=True,
        drain_seconds=600,
        page_cache="auto",
    )
    assert current() == expected


@pytest.mark.parametrize("knob", BOOLS)
@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[(text, True) for text in ("1", "true", "YES", " on ")],
        *[(text, False) for text in ("0", "False", "no", "OFF\n")],
    ],
)
def test_the_environment_sets_a_switch(monkeypatch, knob, text, value):
    monkeypatch.setenv(f"HOLDFAST_{knob.upper()}", text)
    assert getattr(current(), knob) is value


@pytest.mark.parametrize("knob", FINDINGS)
@pytest.mark.parametrize("text", ["ignore", "warn", "error", "ERROR", " warn\n"])
def test_the_environment_sets_what_to_do_about_a_finding(monkeypatch, knob, text):
    monkeypatch.setenv(f"HOLDFAST_{knob.upper()}", text)
    assert getattr(current(), knob) == text.strip().lower()


@pytest.mark.parametrize("knob", NUMBERS)
@pytest.mark.parametrize(("text", "value"), [("0", 0), (" 2.5\n", 2.5), ("1e3", 1000), ("inf", float("inf"))])
def test_the_environment_sets_a_number(monkeypatch, knob, text, value):
    monkeypatch.setenv(f"HOLDFAST_{knob.upper()}", text)
    assert getattr(current(), knob) == value


@pytest.mark.parametrize("knob", TEXTS)
def test_the_environment_sets_a_text(monkeypatch, knob):
    monkeypatch.setenv(f"HOLDFAST_{knob.upper()}", " Rack 7/left\n")
    assert getattr(current(), knob) == "Rack 7/left"


@pytest.mark.parametrize("knob", TEXTS)
def test_an_override_of_a_text_with_something_else_is_an_error(knob):
    with pytest.raises(ValueError, match=f"{knob}=7 is not understood; use a str"), override(**{knob: 7}):
        pass


@pytest.mark.parametrize("knob", NUMBERS)
@pytest.mark.parametrize("text", ["", "soon", "-1", "nan", "10 s", "true"])
def test_a_number_that_is_not_understood_is_an_error_that_says_what_is(monkeypatch, knob, text):
    variable = f"HOLDFAST_{knob.upper()}"
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=f"{variable}=.*number of seconds") as error:
        current()
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("knob", NUMBERS)
@pytest.mark.parametrize("value", [-0.5, float("nan"), True, "10", None])
def test_an_override_of_a_number_with_something_else_is_an_error(knob, value):
    with pytest.raises(ValueError, match=f"{knob}={value!r} is not understood"), override(**{knob: value}):
        pass
    assert current() == Settings()


@pytest.mark.parametrize("knob", NUMBERS)
def test_an_override_takes_whole_numbers_too(knob):
    with override(**{knob: 3}) as inside:
        assert getattr(inside, knob) == 3


@pytest.mark.parametrize("knob", [*BOOLS, *FINDINGS])
@pytest.mark.parametrize("text", ["", "maybe", "2", "None"])
def test_a_value_that_is_not_understood_is_an_error_that_says_what_is(monkeypatch, knob, text):
    variable = f"HOLDFAST_{knob.upper()}"
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=variable) as error:
        current()
    assert repr(text) in str(error.value)
    assert ("true" if knob in BOOLS else "warn") in str(error.value)


@pytest.mark.parametrize(("knob", "choice"), [(knob, choice) for knob in CHOICES for choice in CHOICES[knob]])
def test_the_environment_sets_a_choice(monkeypatch, knob, choice):
    monkeypatch.setenv(f"HOLDFAST_{knob.upper()}", f" {choice.upper()}\n")
    assert getattr(current(), knob) == choice


@pytest.mark.parametrize("knob", CHOICES)
def test_a_choice_that_is_none_is_an_error_that_says_what_is(monkeypatch, knob):
    with pytest.raises(ValueError, match=f"{knob}='warn' is not understood"), override(**{knob: "warn"}):
        pass
    monkeypatch.setenv(f"HOLDFAST_{knob.upper()}", "warn")
    with pytest.raises(ValueError, match=CHOICES[knob][-1]):
        current()


def test_the_environment_is_read_each_time(monkeypatch):
    monkeypatch.setenv("HOLDFAST_VERIFY", "0")
    assert not current().verify
    monkeypatch.setenv("HOLDFAST_VERIFY", "1")
    assert current().verify


def test_an_override_wins_over_the_environment_and_ends_with_its_block(monkeypatch):
    monkeypatch.setenv("HOLDFAST_REPLICA_MISMATCH", "error")
    with override(replica_mismatch="ignore") as inside:
        assert inside.replica_mismatch == current().replica_mismatch == "ignore"
    assert current().replica_mismatch == "error"


def test_overrides_nest():
    with override(verify=False):
        with override(allow_pickle=True) as both:
            assert (both.verify, both.allow_pickle) == (False, True)
            with override(verify=True):
                assert (current().verify, current().allow_pickle) == (True, True)
        assert (current().verify, current().allow_pickle) == (False, False)


def _override_and_raise():
    with override(verify=False):
        raise KeyError


def test_an_override_ends_when_its_block_raises():
    with pytest.raises(KeyError):
        _override_and_raise()
    assert current().verify


def test_an_override_holds_in_its_own_thread_only():
    seen = []
    with override(verify=False):
        thread = threading.Thread(target=lambda: seen.append(current().verify))
        thread.start()
        thread.join()
    assert seen == [True]


def test_an_override_of_an_unknown_knob_is_an_error_and_leaves_nothing_behind():
    with pytest.raises(TypeError, match="no_such_knob"), override(no_such_knob=1):
        pass
    assert current() == Settings()


@pytest.mark.parametrize("knob", FINDINGS)
@pytest.mark.parametrize("value", ["", "eror", "Warn", None, True, 2])
def test_an_override_with_a_value_that_is_not_understood_is_an_error(knob, value):
    with pytest.raises(ValueError, match=f"{knob}={value!r} is not understood.*'error'"), override(**{knob: value}):
        pass
    assert current() == Settings()


@pytest.mark.parametrize("knob", BOOLS)
def test_an_override_of_a_switch_with_something_else_is_an_error(knob):
    with pytest.raises(ValueError, match=f"{knob}='off' is not understood"), override(**{knob: "off"}):
        pass


def test_planners_take_no_misspelt_choice():
    with pytest.raises(ValueError, match="replica_mismatch='eror'"):
        DefaultSavePlanner(replica_mismatch="eror")
    with pytest.raises(ValueError, match="dtype_change='eror'"):
        DefaultLoadPlanner(dtype_change="eror")
