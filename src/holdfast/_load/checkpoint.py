"""``holdfast.open``: a checkpoint as a read-only mapping, of which nothing is read before it is asked for.

``holdfast.read`` reads what is stored at once, as it is.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast._base.arguments import Size
from holdfast._base.html_tables import page, table
from holdfast._base.patterns import Patterns, Selection, chooser
from holdfast._base.texts import in_short
from holdfast._formats.native.refs import TensorRef
from holdfast._formats.native.trees import NOTHING, pruned, refs_in, substituted, with_lists
from holdfast._formats.source import ChunkPlace, Source, WholeReads
from holdfast._load.opening import open_source
from holdfast._load.stored_nodes import StoredNode
from holdfast._load.tensor_handles import TensorHandle, as_elements, torch_is_here
from holdfast._stores.store import Store
from holdfast._watching.progress import OnProgress, size
from holdfast.errors import MissingPackageError, UnknownKeyError

if TYPE_CHECKING:
    import torch

    from holdfast._tools.inspecting.damage import VerifyReport
    from holdfast._tools.inspecting.statistics import Statistics
    from holdfast._tools.reporting.report import HtmlReport

_WHICH_THERE_ARE = "list(checkpoint), or `holdfast show`, lists which there are"


def open_checkpoint(path: str | os.PathLike[str] | Store, *, allow_pickle: bool = False) -> Checkpoint:
    """Open a checkpoint of any kind that Holdfast reads, without a process group, a model or (for its own) torch.

    Known to users as ``holdfast.open``. ``allow_pickle`` loads values that were stored as pickles, which can run any
    code.

    Example:
        >>> import tempfile, torch
        >>> import holdfast
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> saved = holdfast.save({"model": torch.nn.Linear(4, 2), "step": 100}, path, metadata={"loss": 0.25})
        >>> checkpoint = holdfast.open(path)
        >>> list(checkpoint), checkpoint["step"], checkpoint.metadata["loss"]
        (['model.weight', 'model.bias', 'step'], 100, 0.25)
        >>> checkpoint["model.weight"].shape, checkpoint["model.weight"][0:1].shape
        ((2, 4), torch.Size([1, 4]))
    """
    return Checkpoint(open_source(path, allow_pickle=allow_pickle))


def read(
    path: str | os.PathLike[str] | Store,
    *,
    include: Patterns | None = None,
    exclude: Patterns | None = None,
    device: str | torch.device | None = None,
    allow_pickle: bool = False,
) -> Any:
    """The stored state as nested containers, of a checkpoint of any format, without a state to load into.

    Containers and keys have the types with which they were saved, tensors that were tied are one tensor again, and
    per-rank state is a list, by rank. Every digest is compared. It is not a collective call: each process that calls it
    reads everything that it asks for. Without torch, tensors are numpy arrays.

    Args:
        path: a checkpoint of any format: a path, a URL or a ``Store``.
        include: only what has these keys; the containers around it stay.
        exclude: without what has these keys.
        device: where to put the tensors; in the memory of the host by default.
        allow_pickle: load values that were stored as pickles, which can run any code.

    Example:
        >>> import tempfile, torch
        >>> import holdfast
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> saved = holdfast.save({"model": {"w": torch.ones(2)}, "step": 100, "seen": [1, 2]}, path)
        >>> holdfast.read(path)
        {'model': {'w': tensor([1., 1.])}, 'step': 100, 'seen': [1, 2]}
        >>> holdfast.read(path, exclude="model")
        {'step': 100, 'seen': [1, 2]}
    """
    with open_checkpoint(path, allow_pickle=allow_pickle) as checkpoint:
        return checkpoint.read(include, exclude=exclude, device=device)


@contextmanager
def opened(place: str | os.PathLike[str] | Store | Checkpoint, *, allow_pickle: bool = False) -> Iterator[Checkpoint]:
    """A checkpoint for a ``with`` block. One that the caller has opened stays open."""
    if isinstance(place, Checkpoint):
        yield place
        return
    with open_checkpoint(place, allow_pickle=allow_pickle) as checkpoint:
        yield checkpoint


class Checkpoint(Mapping[str, Any]):
    """An opened checkpoint: keys, with handles of tensors and plain values.

    A tensor is read when its handle is sliced, and only as much of it as that takes.
    """

    def __init__(self, source: Source, on_use: Callable[[str], object] | None = None) -> None:
        """``on_use`` is called with every key whose value is asked for, or whose tensor is read."""
        self._source = source
        self._on_use = on_use

    @property
    def path(self) -> str:
        """Where it is."""
        return self._source.location

    @property
    def format(self) -> str:
        """``native``, ``dcp``, ``safetensors`` or ``torch``."""
        return self._source.format

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What was given to ``save`` as ``metadata``."""
        return self._source.metadata

    @property
    def provenance(self) -> Mapping[str, Any]:
        """When, by how many ranks, and with which versions it was saved, as far as that is known."""
        return self._source.provenance

    def __getitem__(self, key: str) -> Any:
        leaf = self._leaves.get(key)
        if leaf is None:
            raise self._unknown(key)
        self._note_use(key)
        return substituted(leaf.value, self._handle)

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def __contains__(self, key: object) -> bool:
        return key in self._leaves

    def leaves(self, pattern: Patterns | None = None, *, exclude: Patterns | None = None) -> list[StoredNode]:
        """All that has a key, or what is meant by ``pattern``, as it is stored: with references in place of tensors.

        That no key is left is an error, as a misspelt pattern would leave none.
        """
        chosen = Selection(pattern, exclude)
        found = [leaf for key, leaf in self._leaves.items() if chosen(key)]
        if not found and not chosen.is_everything:
            raise no_such_keys(self, pattern, exclude)
        return found

    def tree(self) -> Any:
        """The saved state in its containers, with a handle in place of every tensor."""
        return substituted(with_lists(self._source.tree), self._handle)

    def read(
        self,
        include: Patterns | None = None,
        *,
        exclude: Patterns | None = None,
        device: str | torch.device | None = None,
        verify: bool = True,
    ) -> Any:
        """The saved state, or what is included of it and not excluded, read into memory; see ``holdfast.read``.

        ``verify=False`` compares no digests.
        """
        tree = self._source.tree
        chosen = Selection(include, exclude)
        if not chosen.is_everything:
            keys = {leaf.path: key for key, leaf in self._leaves.items()}
            tree = pruned(tree, (), lambda path: path in keys and chosen(keys[path]))
            if tree is NOTHING:
                raise no_such_keys(self, include, exclude)
        place = _placing(device)
        refs = {ref.key: ref for ref in refs_in(tree)}
        buffers = {key: np.empty(ref.shape, ref.dtype.carrier) for key, ref in refs.items()}
        self._source.read_many([], WholeReads.into(buffers), verify=verify)
        for key in filter(chosen, self._leaves):
            self._note_use(key)
        # Taken out one by one: what was copied to a device need not stay in the memory of the host.
        elements = {
            key: place(as_elements(buffers.pop(key), ref, as_torch=ref.numpy is None and torch_is_here()))
            for key, ref in refs.items()
        }
        return substituted(with_lists(tree), lambda ref: elements[ref.key])

    def layout(self, key: str) -> list[ChunkPlace]:
        """How a tensor is cut: its chunks, with the file in which each is stored and the rank that wrote it.

        Example:
            >>> import tempfile, torch
            >>> import holdfast
            >>> path = tempfile.mkdtemp() + "/step-100"
            >>> saved = holdfast.save({"w": torch.ones(4, 2)}, path)
            >>> [(chunk.offsets, chunk.sizes, chunk.rank) for chunk in holdfast.open(path).layout("w")]
            [((0, 0), (4, 2), 0)]
        """
        leaf = self._leaves.get(key)
        if leaf is None:
            raise self._unknown(key)
        if not isinstance(leaf.value, TensorRef):
            raise TypeError(f"{key!r} of {self.path} is a value, not a tensor, so it has no parts")
        return list(self._source.chunk_places(leaf.value.key))

    def files(self) -> list[tuple[str, int]]:
        """The files that it consists of, by name, and the bytes that each has on disk."""
        return self._source.files()

    def statistics(
        self,
        pattern: Patterns | None = None,
        *,
        bins: int = 64,
        memory_budget: Size | None = None,
        on_progress: OnProgress | None = None,
    ) -> Statistics:
        """What the numbers in a tensor are like: smallest, largest, mean, spread, norm, how many are nan, a histogram.

        ``pattern`` is a key, or says which tensors are taken together; all of them by default. They are read in parts,
        twice; once with ``bins=0``, which leaves the histogram out.

        Example:
            >>> import tempfile, torch
            >>> import holdfast
            >>> path = tempfile.mkdtemp() + "/step-100"
            >>> saved = holdfast.save({"w": torch.tensor([0.0, 1, 2, float("nan")])}, path)
            >>> found = holdfast.open(path).statistics("w", bins=2)
            >>> found.minimum, found.maximum, found.mean, found.nan, found.histogram
            (0.0, 2.0, 1.0, 1, (1, 2))
        """
        from holdfast._tools.inspecting.statistics import statistics_of

        refs = self._refs_meant_by(pattern)
        return statistics_of(self._source, refs, bins=bins, memory_budget=memory_budget, on_progress=on_progress)

    def _refs_meant_by(self, pattern: Patterns | None) -> list[TensorRef]:
        """The stored tensors, each once, that have a key which is meant."""
        chosen = chooser(pattern, otherwise=True)
        if isinstance(pattern, str) and pattern in self._leaves:
            chosen = pattern.__eq__
        meant = [leaf for key, leaf in self._leaves.items() if chosen(key)]
        refs = {ref.key: ref for leaf in meant for ref in refs_in(leaf.value)}
        if not refs and pattern is not None:
            if not meant:
                raise self._unknown(pattern)
            raise TypeError(f"{pattern!r} means no tensor of {self.path}, only values, which have no statistics")
        return list(refs.values())

    def report(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        compare: str | os.PathLike[str] | Store | Checkpoint | None = None,
        statistics: Patterns | bool | None = None,
        verify: bool = False,
        memory_budget: Size | None = None,
        on_progress: OnProgress | None = None,
    ) -> HtmlReport:
        """A page about it, for a browser or a notebook. It is written to ``path`` if that is given.

        ``compare`` is another checkpoint, ``statistics`` says which tensors to count and draw (True for all, False for
        none; the largest by default), and ``verify`` reads all that is stored, to compare digests.
        """
        from holdfast._tools.reporting.report import make_report

        report = make_report(
            self,
            compare=compare,
            statistics=statistics,
            verify=verify,
            memory_budget=memory_budget,
            on_progress=on_progress,
        )
        if path is not None:
            report.save(path)
        return report

    def verify(
        self,
        *,
        include: Patterns | None = None,
        exclude: Patterns | None = None,
        memory_budget: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> VerifyReport:
        """Read everything that is stored, compare it with all digests there are, and list all damage.

        The same as ``holdfast.verify``, with the same arguments and the same report: ``report.ok`` is the verdict.
        """
        from holdfast._tools.inspecting.verify import verify

        return verify(self, include=include, exclude=exclude, memory_budget=memory_budget, on_progress=on_progress)

    def close(self) -> None:
        """Let go of what is open."""
        self._source.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        tensors = self._source.tensors.values()
        total = sum(ref.nbytes for ref in tensors)
        return f"<{self.format} checkpoint {self.path}: {len(tensors)} tensors, {total:,} bytes, {len(self)} keys>"

    def _repr_html_(self) -> str:
        """What notebooks show."""
        tensors = self._source.tensors.values()
        facts = (
            f"{self.format}, {len(tensors):,} tensors, {size(sum(ref.nbytes for ref in tensors))}, {len(self):,} keys"
        )
        saved = self.provenance.get("time")
        rows = ((key, *_in_columns(leaf.value)) for key, leaf in self._leaves.items())
        listed = table(["key", "what", "size"], rows, numbers=[2], total=len(self))
        whole = page(self.path, f"{facts}, saved {saved}" if saved else facts, listed)
        return whole.encode("utf-8", "replace").decode()  # names of files may be anything

    @cached_property
    def _leaves(self) -> dict[str, StoredNode]:
        return {leaf.key: leaf for leaf in StoredNode.of(self._source.tree).leaves()}

    def _handle(self, ref: TensorRef) -> TensorHandle:
        return TensorHandle(self._source, ref, self._note_read)

    def _note_read(self, ref: TensorRef) -> None:
        if self._on_use is not None:
            for key in self._names[ref.key]:
                self._on_use(key)

    def _note_use(self, key: str) -> None:
        if self._on_use is not None:
            self._on_use(key)

    @cached_property
    def _names(self) -> Mapping[str, list[str]]:
        """All keys that a stored tensor has, by its own. Tied ones have several."""
        names: dict[str, list[str]] = {}
        for key, leaf in self._leaves.items():
            if isinstance(leaf.value, TensorRef):
                names.setdefault(leaf.value.key, []).append(key)
        return names

    def _unknown(self, key: Any) -> UnknownKeyError:
        below = [other for other in self._leaves if other.startswith(f"{key}.")]
        near = below[:5] or difflib.get_close_matches(str(key), list(self._leaves)[:5000], n=3)
        if below:
            text = f"{key!r} is not one entry but {len(below)}, such as {below[0]!r}; read({key!r}) reads them all"
        else:
            hint = f"did you mean {near[0]!r}?" if near else _WHICH_THERE_ARE
            text = f"there is no {key!r} in {self.path}; {hint}"
        return UnknownKeyError(text, key=str(key), path=self.path, near=near)


def source_of(checkpoint: Checkpoint) -> Source:
    """What an opened checkpoint is read from, for those who read regions of tensors into memory of their own."""
    return checkpoint._source


def no_such_keys(checkpoint: Checkpoint, include: Patterns | None, exclude: Patterns | None = None) -> UnknownKeyError:
    """What to raise if patterns leave no key of a checkpoint."""
    if include is None:
        text = f"all keys of {checkpoint.path} are excluded by {_in_words(exclude)}"
        return UnknownKeyError(text, key=_in_words(exclude), path=checkpoint.path, near=[])
    return checkpoint._unknown(_in_words(include))


def _placing(device: str | torch.device | None) -> Callable[[Any], Any]:
    """Puts tensors on a device, and leaves arrays of numpy alone. A device that is not there is an error at once."""
    if device is None:
        return lambda elements: elements
    if not torch_is_here():
        raise MissingPackageError(
            f"to read tensors to the device {str(device)!r} takes torch, which is not installed",
            install="torch",
        )
    import torch

    torch.empty(0, device=device)
    return lambda elements: elements.to(device) if isinstance(elements, torch.Tensor) else elements


def _in_words(patterns: Any) -> str:
    return ", ".join(map(str, patterns if isinstance(patterns, (list, tuple)) else [patterns]))


def _in_columns(value: Any) -> tuple[str, str]:
    """What something that is stored is, and what it takes."""
    if isinstance(value, TensorRef):
        return f"{value.dtype} {list(value.shape)}", size(value.nbytes)
    return in_short(value), ""
