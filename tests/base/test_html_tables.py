"""What notebooks show of checkpoints and loads: escaped, self-contained, not too long."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import torch

import holdfast


class _Tags(HTMLParser):
    """Collects what is in a page, and that tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.seen.append(tag)
        assert {name for name, _ in attrs} <= {"class"}  # no links, no scripts, nothing that loads anything

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def parsed(html: str) -> _Tags:
    tags = _Tags()
    tags.feed(html)
    tags.close()
    assert tags.open == []
    assert set(tags.seen) <= {"div", "style", "b", "table", "thead", "tbody", "tr", "th", "td"}
    assert not re.search(r"https?://|url\(|@import", html)
    return tags


NASTY = '<script>alert("x")</script>&amp;'


def test_a_checkpoint_is_a_table_with_escaped_keys(tmp_path: Path) -> None:
    holdfast.save({NASTY: torch.ones(3, 2), "value": NASTY, "step": 3}, tmp_path / "c")

    tags = parsed(holdfast.open(tmp_path / "c")._repr_html_())

    assert NASTY in tags.texts
    assert repr(NASTY) in tags.texts
    assert "float32 [3, 2]" in tags.texts
    assert "24 B" in tags.texts
    assert any("native, 1 tensors, 24 B, 3 keys, saved 20" in text for text in tags.texts)


def test_many_keys_are_cut(tmp_path: Path) -> None:
    holdfast.save({f"k{number}": number for number in range(500)}, tmp_path / "c")

    html = holdfast.open(tmp_path / "c")._repr_html_()

    assert parsed(html).seen.count("tr") == 201
    assert "… and 300 more" in html


def test_a_load_tells_what_it_did(tmp_path: Path) -> None:
    holdfast.save({"model": {"w": torch.ones(3), NASTY: torch.ones(1)}, "other": 1}, tmp_path / "c")
    state = {"model": {"w": torch.zeros(3, dtype=torch.float64), "new": torch.ones(2)}}

    tags = parsed(holdfast.load(state, tmp_path / "c", cast=True, strict=False)._repr_html_())

    text = "\n".join(tags.texts)
    for word in (
        "loaded from",
        "1 keys, 3 elements, ",
        "w (float32 -> float64)",
        "model.new",
        f"model.{NASTY}",
        "other",
    ):
        assert word in text
