"""Compare checkpoints: what training has changed, what a damaged copy has lost, and why another model cannot load it.

    python examples/compare_checkpoints.py [FOLDER]

Nothing here needs the training program, and tensors may be larger than the memory: they are read in parts.
"""

import os
import shutil
import sys
import tempfile

import torch
from torch import nn

import holdfast


def main():
    folder = tempfile.mkdtemp(prefix="compare-checkpoints-", dir=sys.argv[1] if len(sys.argv) > 1 else None)
    before, after = (os.path.join(folder, name) for name in ("step-0", "step-50"))
    train_and_save(before, after)

    report = holdfast.diff(before, after, include="model")
    print(f"changed: {', '.join(report.changed_tensors)}; equal: {report.equal}")
    changed = report.changed_tensors["model.2.weight"]
    assert changed.differing == changed.elements
    assert 0 < changed.relative < 1

    weights = holdfast.open(after).statistics("model.2.weight")
    print(f"finite: {weights.finite} of {weights.count}, in a histogram of {len(weights.histogram)} bins")
    assert sum(weights.histogram) == weights.count

    copy = os.path.join(folder, "copy")
    shutil.copytree(after, copy)
    damage_one_byte(copy)
    found = holdfast.verify(copy)
    print(f"the copy is intact: {found.ok}; {len(found.damage)} place is damaged, in {len(found.damaged_keys)} keys")
    assert holdfast.verify(after).ok

    other = {"model": {"net": network()}}
    answer = holdfast.explain(after, other)
    print(f"would load into another model: {answer.ok}; {answer.hints[0]}")
    assert holdfast.explain(after, other, rename={"model": "model.net"}).ok


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def train_and_save(before, after):
    torch.manual_seed(1)
    model = network()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.01)
    holdfast.save({"model": model, "step": 0}, before)
    for _ in range(50):
        optimizer.zero_grad()
        (model(torch.randn(32, 8)) - 1).square().mean().backward()
        optimizer.step()
    holdfast.save({"model": model, "step": 50}, after)


def damage_one_byte(folder):
    [name] = [name for name in os.listdir(folder) if name.startswith("data-")]
    with open(os.path.join(folder, name), "r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


if __name__ == "__main__":
    main()
