"""The store that `docs/stores.md` shows is a store."""

from __future__ import annotations

import re
import runpy
import tempfile
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast._stores.store import Store
from tests import s3_server

PAGE = Path(__file__).parents[2] / "docs" / "stores.md"


def code_of_the_page(kind: str = "python") -> str:
    return "\n\n".join(re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))


def run(code: str, **names: object) -> dict[str, object]:
    with tempfile.NamedTemporaryFile("w", suffix=".py", encoding="utf-8") as program:
        program.write(code)
        program.flush()
        return runpy.run_path(program.name, names, run_name="docs_stores")


shown = run(code_of_the_page())
TestSqliteStore = shown["TestSqliteStore"]  # pytest runs all of its tests


@pytest.mark.skipif(bool(s3_server.MISSING), reason=s3_server.WHY_SKIPPED)
def test_what_the_page_does_at_urls_works():
    """With a bucket and a server of the tests in place of those that it talks of."""
    bucket = s3_server.new_bucket()
    code = code_of_the_page("python no-run").replace("http://minio:9000", bucket.options["endpoint_url"])
    code = code.replace("s3://bucket/", bucket.url(""))
    code = code.replace("holdfast.save(state, Fsspec", "holdfast.save(state, overwrite=True, path=Fsspec")
    with bucket.in_environment():
        run(code, holdfast=holdfast, state={"model": {"embedding": {"weight": torch.arange(40.0).reshape(20, 2)}}})
    assert "holdfast.json" in bucket.names("run/step-100")


def test_the_page_mentions_what_a_store_must_have():
    page = PAGE.read_text("utf-8")
    abstract = Store.__abstractmethods__
    assert abstract
    assert [name for name in abstract if f"`{name}(" not in page] == []
