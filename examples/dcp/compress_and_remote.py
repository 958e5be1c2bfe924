"""Compress a checkpoint, and keep it anywhere that fsspec reaches: s3://, gs://, memory:// and many more.

    python examples/dcp/compress_and_remote.py [URL]

Takes the packages fsspec and zstandard, and that of the protocol, such as s3fs. The URL is memory:// by default, which
lasts as long as the process. The index says that the items are compressed, so nothing has to be said when loading.
"""

import sys

import fsspec
import torch
from torch import nn

import holdfast.dcp as dcp
from holdfast.dcp._extension import ZStandard
from holdfast.dcp.fsspec_filesystem import FsspecReader, FsspecWriter


def main():
    url = sys.argv[1] if len(sys.argv) > 1 else "memory://checkpoints"
    torch.manual_seed(1)
    model = nn.Linear(512, 512)
    model.weight.data *= torch.rand(512, 512) > 0.9  # a pruned model: zeros compress well

    plain, compressed = f"{url}/plain", f"{url}/compressed"
    dcp.save({"model": model}, storage_writer=FsspecWriter(plain))
    dcp.save({"model": model}, storage_writer=FsspecWriter(compressed, _extensions=[ZStandard()]))
    before, after = size_of(plain), size_of(compressed)
    assert after < before / 2
    print(f"{before} bytes, compressed {after}")

    for where in (plain, compressed):
        loaded = nn.Linear(512, 512)
        dcp.load({"model": loaded}, storage_reader=FsspecReader(where))
        assert torch.equal(loaded.weight, model.weight)
        print(f"{where}: loaded, the same weights")


def size_of(url):
    files, path = fsspec.core.url_to_fs(url)
    return sum(file["size"] for file in files.ls(path, detail=True) if file["name"].endswith(".distcp"))


if __name__ == "__main__":
    main()
