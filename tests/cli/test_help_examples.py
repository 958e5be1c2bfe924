"""Every example of every command's help does what it says, and so does every command with ``--json``."""

from __future__ import annotations

import glob
import shlex

import pytest

from holdfast._cli.app import COMMANDS, Example
from holdfast._cli.described import described_commands
from holdfast._cli.main import MODULES, import_commands

import_commands()
EXAMPLES = [example for declared in COMMANDS.values() for example in declared.examples if example.runs]


def arguments_of(example: Example) -> list[str]:
    """What a shell makes of the line."""
    program, *words = shlex.split(example.line)
    _, *written = shlex.split(example.line, posix=False)
    assert program == "holdfast"
    found = []
    for word, as_written in zip(words, written, strict=True):
        found += [word] if as_written[0] in "'\"" else sorted(glob.glob(word)) or [word]
    return found


def test_every_module_declares_the_command_that_it_is_called_after():
    assert list(COMMANDS) == list(MODULES)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_a_title_a_text_examples_and_json(name):
    described = next(command for command in described_commands() if command.name == name)

    assert described.title.endswith(".")
    assert len(described.title) <= 100
    assert described.text
    assert described.examples
    assert any("--json" in option.names for option in described.options)
    assert all(option.help for option in described.options)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.line)
def test_examples_run_and_end_with_the_status_they_announce(prepared, cli, example):
    ran = cli(*arguments_of(example))

    assert ran.status == example.status, ran.err
    assert ran.out or example.status
    assert "\x1b" not in ran.out + ran.err  # this is no terminal


@pytest.mark.parametrize("example", [one for one in EXAMPLES if "--json" not in one.line], ids=lambda one: one.line)
def test_examples_answer_with_one_json_object_if_asked(prepared, cli, example):
    ran = cli(*arguments_of(example), "--json")

    assert ran.status == example.status, ran.out + ran.err
    assert isinstance(ran.json, dict)
    assert "error" not in ran.json


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_is_shown_and_ends_with_the_examples(cli, name):
    ran = cli(name, "--help")

    assert ran.status == 0
    assert f"holdfast {name}" in ran.out
    for example in COMMANDS[name].examples:
        assert example.line in ran.out
        assert example.says in ran.out
