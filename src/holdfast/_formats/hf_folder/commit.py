"""How the files of a Hugging Face folder are replaced together, although their names are always the same."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NoReturn

from holdfast._base.commits import Commit
from holdfast._base.json_objects import parse_json_object
from holdfast._formats.hf_folder.names import (
    COMMIT_NAME,
    INDEX_NAME,
    files_in,
    generation_of,
    is_data_file,
    is_inside_folder,
    temporary_name,
)
from holdfast._stores.durable_files import write_durably
from holdfast._stores.filesystem import AnyPath, FileSystemBase
from holdfast._stores.store import is_unanswered
from holdfast.errors import DamagedCheckpointError, IncompleteSaveError

# Whether a commit by file operations that raised has surely not happened, as far as the one who tried it can prove.


def rename_has_failed(
    fs: FileSystemBase, temporary: AnyPath, final: AnyPath, content: bytes, error: BaseException
) -> bool:
    """Whether a file surely did not get its final name when the rename ended in ``error``. It is removed in any case.

    That its temporary name could be taken away is the proof: what was renamed has it no longer, and a rename that is
    still on its way finds nothing. What has the final name is looked at too, since some file systems rename by copying.
    """
    try:
        fs.rm_file(temporary)
    except Exception:
        return False
    return put_has_failed(fs, final, content, error)


def put_has_failed(fs: FileSystemBase, final: AnyPath, content: bytes, error: BaseException) -> bool:
    """Whether a file surely did not get this content when that ended in ``error``."""
    return not is_unanswered(error) and not holds(fs, final, content, if_unknown=True)


def holds(fs: FileSystemBase, path: AnyPath, content: bytes, *, if_unknown: bool) -> bool:
    """Whether a file has this content. ``if_unknown`` is the answer if it cannot be read."""
    try:
        with fs.create_stream(path, "rb") as stream:
            return bool(stream.read() == content)
    except FileNotFoundError:
        return False
    except Exception:
        return if_unknown


# A save writes all of its files under temporary names. Then one rename puts a record in place that says which
# temporary file is to get which name: from that moment on the folder holds the new checkpoint, and readers that know
# the record find its files under either name. After that the files get their names, the index comes last, and the
# record is removed. Readers that do not know the record never see an index whose files are of different saves: there
# is none meanwhile.


@dataclass(frozen=True)
class Switch:
    """A complete set of files that is to take the place of what is in a folder."""

    generation: str
    save_id: str | None
    files: Mapping[str, str]
    """Final name to temporary name, both relative to the folder."""
    index: Mapping[str, Any] | None
    """The content of the index; None for checkpoints that have no index."""

    def places(self, name: str) -> tuple[str, str]:
        """Where a file of the set may be: it has its final name, or still a temporary one."""
        return self.files[name], name

    def record(self) -> bytes:
        """The file that commits it."""
        content = {"generation": self.generation, "save_id": self.save_id, "index": self.index}
        return _encoded({**content, "files": dict(self.files)})


def _encoded(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode()


def make_index(weight_map: Mapping[str, str], total_size: int, save_id: str | None) -> dict[str, Any]:
    """The content of an index."""
    about: dict[str, Any] = {"total_size": total_size}
    if save_id is not None:
        about["holdfast_save_id"] = save_id
    return {"metadata": about, "weight_map": dict(sorted(weight_map.items()))}


class Folder:
    """A folder whose files are replaced, and those in the folder ``inner`` of it if that is given."""

    def __init__(self, fs: FileSystemBase, path: AnyPath, *, sync: bool = True, inner: str | None = None) -> None:
        self.fs = fs
        self.path = path
        self.sync = sync
        self.inner = inner

    def at(self, name: str) -> AnyPath:
        """The path of a file in the folder."""
        return self.fs.concat_path(self.path, name)

    def names(self) -> set[str]:
        """What is in the folder; nothing if there is none. One that cannot be looked into is an error."""
        found: set[str] = set()
        with suppress(FileNotFoundError, NotADirectoryError):
            found |= {PurePath(path).name for path in self.fs.ls(self.path)}
            if self.inner in found:
                found |= {f"{self.inner}/{PurePath(path).name}" for path in self.fs.ls(self.at(self.inner))}
        return found

    def remove(self, names: Iterable[str]) -> None:
        """Remove files that no checkpoint needs, so a failure is only untidy."""
        for name in names:
            with suppress(OSError):
                self.fs.rm_file(self.at(name))

    def prepare(self, switch: Switch) -> None:
        """Write what the switch needs, durably; nothing changes for readers."""
        contents = {COMMIT_NAME: switch.record()}
        if switch.index is not None:
            contents[INDEX_NAME] = _encoded(switch.index)
        for name, content in contents.items():
            write_durably(self.fs, self.at(temporary_name(name, switch.generation)), content, sync=self.sync)
        self._sync(switch)

    def refuse_lost_files(self, switch: Switch) -> None:
        """Raise if files of the set are not there."""
        lost = sorted(temporary for temporary in switch.files.values() if not self.fs.exists(self.at(temporary)))
        if lost:
            raise IncompleteSaveError(
                f"{self.path}: {', '.join(lost[:10])} cannot be seen by the process that commits. The folder must be "
                "on a disk that all ranks share; or another save into the same folder has removed the file. Nothing "
                "was committed: save again to a folder of its own.",
                missing=lost,
            )

    def commit(self, switch: Switch, commit: Commit | None = None) -> None:
        """Put the record in place: from here on the new checkpoint is the one that is loaded.

        If it raises, ``commit`` says whether the record may be there all the same, or may get there yet.
        """
        commit = commit or Commit()
        temporary, final = self.at(temporary_name(COMMIT_NAME, switch.generation)), self.at(COMMIT_NAME)
        commit.may_have_happened = True
        try:
            self.fs.rename(temporary, final)
        except BaseException as error:
            commit.may_have_happened = not rename_has_failed(self.fs, temporary, final, switch.record(), error)
            raise
        self._sync(switch)

    def give_names(self, switch: Switch, stale: Iterable[str]) -> None:
        """After the commit: give all files their names, the index last, and remove what is ``stale``."""
        if INDEX_NAME in self.names():
            self.fs.rm_file(self.at(INDEX_NAME))
            self._sync(switch)
        for name, temporary in switch.files.items():
            self.fs.rename(self.at(temporary), self.at(name))
        self._sync(switch)
        self.remove(stale)
        if switch.index is not None:
            self.fs.rename(self.at(temporary_name(INDEX_NAME, switch.generation)), self.at(INDEX_NAME))
            self._sync(switch)
        self.fs.rm_file(self.at(COMMIT_NAME))

    def stale(self, before: Iterable[str], switch: Switch, *, keep: Iterable[str] = ()) -> list[str]:
        """Of the names that were there ``before``: files of earlier saves, except those of saves that still write."""
        before = set(before)
        alive = files_in(self.names() - before).of_our_saves()
        left = files_in(before, {*switch.files, *switch.files.values(), *keep})
        return sorted(name for save, names in left.by_save.items() if save not in alive for name in names)

    def remove_unfinished(self, generation: str) -> None:
        """Remove what a save has written that was not committed. A failure is only untidy here too."""
        with suppress(OSError):
            self.remove(files_in(self.names()).by_save.get(generation, ()))

    def switch_under_way(self) -> Switch | None:
        """A switch that was committed and whose files may not all have their names yet."""
        try:
            with self.fs.create_stream(self.at(COMMIT_NAME), "rb") as stream:
                content = parse_json_object(stream.read(), str(self.at(COMMIT_NAME)))
        except (FileNotFoundError, NotADirectoryError):
            return None
        generation, save_id = content.get("generation"), content.get("save_id")
        if not isinstance(generation, str) or not isinstance(save_id, str | None):
            self._refuse_record("it does not name its save")
        if not isinstance(content.get("files"), dict):
            self._refuse_record("it lists no files")
        files = {name: temporary for name, temporary in content["files"].items() if self._is_pair(name, temporary)}
        if len(files) < len(content["files"]):
            self._refuse_record("it names files that are not part of a checkpoint")
        return Switch(generation, save_id, files, content.get("index"))

    @staticmethod
    def _is_pair(name: str, temporary: Any) -> bool:
        if not isinstance(temporary, str) or not is_inside_folder(name) or not is_inside_folder(temporary):
            return False
        return is_data_file(PurePath(name).name) and generation_of(temporary) is not None

    def _refuse_record(self, why: str) -> NoReturn:
        file = str(self.at(COMMIT_NAME))
        raise DamagedCheckpointError(
            f"{file}, the record of a save, cannot be used: {why}. Save again, or load another checkpoint.",
            file=file,
            key=None,
            expected="a record of a save",
            found=why,
        )

    def _sync(self, switch: Switch) -> None:
        if not self.sync:
            return
        self.fs.sync_folder(self.path)
        for inner in {str(PurePath(name).parent) for name in switch.files} - {"."}:
            self.fs.sync_folder(self.at(inner))
