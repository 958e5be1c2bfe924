"""The store that `docs/stores.md` shows is a store."""

from __future__ import annotations

import re
import runpy
import tempfile
from pathlib import Path

from holdfast.stores.store import Store

PAGE = Path(__file__).parents[2] / "docs" / "stores.md"


def code_of_the_page() -> dict[str, object]:
    with tempfile.NamedTemporaryFile("w", suffix=".py", encoding="utf-8") as program:
        program.write("\n\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)))
        program.flush()
        return runpy.run_path(program.name, run_name="docs_stores")


shown = code_of_the_page()
TestSqliteStore = shown["TestSqliteStore"]  # pytest runs all of its tests


def test_the_page_mentions_what_a_store_must_have():
    page = PAGE.read_text("utf-8")
    abstract = Store.__abstractmethods__
    assert abstract
    assert [name for name in abstract if f"`{name}(" not in page] == []
