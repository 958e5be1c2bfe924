"""``docs/cli.md`` and the manual page say what the help of the commands says."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast._cli.described import described_commands
from holdfast._cli.main import import_commands
from tools.cli_pages import write

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.mark.parametrize("name", ["cli.md", "holdfast.1"])
def test_the_documents_are_those_of_the_help(tmp_path, name):
    write(tmp_path)

    assert (DOCS / name).read_text() == (tmp_path / name).read_text(), "run: make docs"


def test_every_command_option_and_example_is_in_the_page(tmp_path):
    page = write(tmp_path)[0].read_text()
    import_commands()

    for command in described_commands():
        section = page.partition(f"\n## holdfast {command.name}\n")[2].partition("\n## ")[0]
        assert command.title in section
        for option in command.options:
            assert ", ".join(option.names) in section
        for example in command.examples:
            assert f"{example.line} " in section
