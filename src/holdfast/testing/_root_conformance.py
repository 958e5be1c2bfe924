"""The contract of ``holdfast.stores.Root`` as tests, for authors of roots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import pytest

from holdfast._stores.roots import Root
from holdfast.errors import CommitConflictError, UnsafePathError

_UNSAFE_NAMES = ["", ".", "..", "../other", "folder/file", "/etc", "a\\b", "nul\0byte"]


class RootConformance(ABC):
    """Every test here says something that a manager of checkpoints relies on. Its stores have a suite of their own.

    Subclass it in a test module, under a name that begins with ``Test``, and say how a root is made. Called with one
    folder, ``make_root`` gives roots of one place, as two processes have.

    >>> from holdfast.stores import LocalRoot
    >>> class TestLocalRoot(RootConformance):
    ...     def make_root(self, folder):
    ...         return LocalRoot(folder / "run")
    """

    @abstractmethod
    def make_root(self, folder: Path) -> Root:
        """A root of a place that belongs to ``folder``: in it, or named after it. Nothing is there at first."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Root:
        """The root under test."""
        return self.make_root(tmp_path)

    @pytest.fixture
    def same_place(self, tmp_path: Path) -> Root:
        """Another root of the same place."""
        return self.make_root(tmp_path)

    def test_there_is_nothing_at_first(self, root: Root) -> None:
        assert root.children() == []
        assert root.store.list() == []

    def test_a_sub_folder_exists_once_something_is_written_to_it(self, root: Root, same_place: Root) -> None:
        store = root.child("step-1")
        assert "step-1" not in root.children()
        store.put("data", b"0123")
        assert root.children() == same_place.children() == ["step-1"]
        assert same_place.child("step-1").read("data") == b"0123"

    def test_sub_folders_are_apart_from_each_other_and_from_the_root(self, root: Root) -> None:
        for name in ("step-1", "step-2", "step-10"):
            root.child(name).put("data", name.encode())
        root.store.put("data", b"root")
        assert sorted(root.children()) == ["step-1", "step-10", "step-2"]
        assert root.child("step-1").read("data") == b"step-1"
        assert [listed.name for listed in root.store.list()] == ["data"]
        assert root.store.read("data") == b"root"

    def test_objects_of_the_root_are_no_sub_folders(self, root: Root) -> None:
        root.store.put("data", b"")
        assert root.children() == []

    def test_objects_of_the_root_are_committed(self, root: Root, same_place: Root) -> None:
        root.store.commit("run", b"first", replaces=None)
        with pytest.raises(CommitConflictError):
            same_place.store.commit("run", b"other", replaces=b"something else")
        same_place.store.commit("run", b"second", replaces=b"first")
        assert root.store.read("run") == b"second"

    def test_an_empty_sub_folder_is_removed(self, root: Root, same_place: Root) -> None:
        root.child("step-1").put("data", b"")
        root.child("step-1").delete(["data"])
        assert root.remove("step-1")
        assert same_place.children() == []

    def test_a_sub_folder_with_anything_in_it_stays(self, root: Root) -> None:
        root.child("step-1").put("somebody's", b"notes")
        assert not root.remove("step-1")
        assert root.children() == ["step-1"]
        assert root.child("step-1").read("somebody's") == b"notes"

    def test_a_sub_folder_that_never_was_needs_no_removal(self, root: Root) -> None:
        assert root.remove("step-1")

    def test_a_sub_folder_that_was_removed_can_be_written_again(self, root: Root) -> None:
        root.child("step-1").put("data", b"first")
        root.child("step-1").delete(["data"])
        store = root.child("step-1")
        root.remove("step-1")
        store.put("data", b"second")
        assert root.children() == ["step-1"]
        assert root.child("step-1").read("data") == b"second"

    @pytest.mark.parametrize("name", _UNSAFE_NAMES)
    def test_a_name_that_leads_elsewhere_is_refused(self, root: Root, name: str) -> None:
        with pytest.raises(UnsafePathError):
            root.child(name)
        with pytest.raises(UnsafePathError):
            root.remove(name)

    def test_free_space_is_a_number_or_unknown(self, root: Root) -> None:
        free = root.free_bytes()
        assert free is None or free > 0

    def test_it_says_where_it_is(self, root: Root) -> None:
        assert root.location
        assert root.child("step-1").location.startswith(root.location)
