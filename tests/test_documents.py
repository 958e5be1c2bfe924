"""The Python examples in the README and the guide run, one after the other, as a reader would run them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    "README.md",
    "docs/guide.md",
    "docs/training.md",
    "docs/retention.md",
    "docs/watching.md",
    "docs/inspecting.md",
    "docs/converting.md",
]


def what_a_program_has() -> dict[str, Any]:
    """A model in the middle of its training."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)

    def train_step() -> torch.Tensor:
        loss = model(torch.randn(3, 4)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    train_step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "step": 100,
        "total": 102,
        "train_step": train_step,
    }


def examples_in(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_examples_of_a_document_run(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__", **what_a_program_has()}
    examples = examples_in(document)

    for number, example in enumerate(examples):
        exec(compile(example, f"{document}, example {number}", "exec"), names)  # noqa: S102 - our own documents

    assert examples


@pytest.mark.parametrize("document", ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_the_links_of_a_document_lead_somewhere(document: str) -> None:
    folder = (ROOT / document).parent
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / document).read_text())

    assert [link for link in links if not (folder / link).exists()] == []
    assert "@" not in re.sub(r"`[^`]*`|^```.*?^```", "", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE)
