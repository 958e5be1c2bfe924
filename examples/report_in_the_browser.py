"""A page about a checkpoint, and about what changed since another one: all in one file, for any browser.

    python examples/report_in_the_browser.py [FOLDER]

It needs no server and no network, so it can be mailed, or kept beside the checkpoint. In a notebook, a report that is
the last thing in a cell is shown there. The command for the same is `holdfast report STEP-200 --compare STEP-100`.
"""

import os
import sys
import tempfile

import torch
from torch import nn

import holdfast


def main():
    folder = os.path.join(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir(), "report-in-the-browser")
    before, after = os.path.join(folder, "step-100"), os.path.join(folder, "step-200")
    model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    holdfast.save({"model": model, "step": 100}, before, overwrite=True, metadata={"loss": 0.5})
    with torch.no_grad():
        model[1].weight.mul_(1.01)
    holdfast.save({"model": model, "step": 200}, after, overwrite=True, metadata={"loss": 0.25})

    with holdfast.open(after) as ckpt:
        report = ckpt.report(compare=before, statistics="model.*", verify=True)
    page = report.save(os.path.join(folder, "report.html"))

    totals, changes = report.facts["totals"], report.facts["compare"]
    changed = [number for number, status in enumerate(changes["status"]) if changes["statuses"][status] != "equal"]
    print(f"{totals['tensors']} tensors, {totals['bytes']:,} bytes, intact: {report.facts['verify']['ok']}")
    print(f"{len(changed)} of {len(changes['status'])} entries changed since step-100")
    assert "http://" not in report.html.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in report.html
    print("open it in a browser:", os.path.basename(page))


if __name__ == "__main__":
    main()
