"""Which places are reached over a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast._stores.network_disks import file_system_of, is_far, is_of_network
from holdfast.stores import LocalStore, MemoryStore

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /data rw,relatime shared:20 - nfs4 server:/export rw,vers=4.2
31 30 0:41 / /data/scratch\\040disk rw - tmpfs tmpfs rw
32 22 0:42 / /lustre rw,flock - lustre 10.0.0.1@tcp:/fs rw
33 22 0:43 / /over rw - ext4 /dev/sdb1 rw
34 22 0:44 / /over rw - fuse.s3fs s3fs rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/me", "ext4"),
        ("/data", "nfs4"),
        ("/data/run/step-1", "nfs4"),
        ("/database", "ext4"),
        ("/data/scratch disk/run", "tmpfs"),
        ("/lustre/run", "lustre"),
        ("/over/run", "fuse.s3fs"),  # what was mounted last is on top
    ],
)
def test_the_mount_nearest_to_a_path_says_what_it_is_on(tmp_path, path, kind):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert file_system_of(Path(path), mounts) == kind


def test_where_the_system_does_not_say_it_is_taken_for_a_local_disk(tmp_path):
    assert file_system_of(tmp_path, tmp_path / "nothing") is None
    assert not is_of_network(None)


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "lustre", "gpfs", "ceph", "cifs", "beegfs", "fuse.s3fs", "fuse.gcsfuse"]
)
def test_network_file_systems_are_known(kind):
    assert is_of_network(kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "fuse.fuse-overlayfs"])
def test_local_file_systems_are_known(kind):
    assert not is_of_network(kind)


def test_object_stores_are_far_and_folders_of_this_machine_are_not(tmp_path):
    assert is_far("s3://bucket/run")
    assert is_far(MemoryStore("run"))
    assert not is_far(tmp_path)
    assert not is_far(LocalStore(tmp_path))
