"""How much of a report is done: its parts read one after the other, and are told as one."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.progress import OnProgress


class Work:
    """Parts that read so many bytes each, as one progress.

    >>> told = []
    >>> work = Work({"verify": 100, "statistics": 50}, lambda done, total: told.append((done, total)))
    >>> work.part("verify")(100, 100)
    >>> work.part("statistics")(20, 40)
    >>> told
    [(100, 150), (125, 150)]
    """

    def __init__(self, nbytes: Mapping[str, int], on_progress: OnProgress | None) -> None:
        self._nbytes = dict(nbytes)
        self._done = dict.fromkeys(nbytes, 0.0)
        self._on_progress = on_progress

    def part(self, name: str) -> OnProgress:
        """What tells of one part, in whichever units it counts."""

        def on_progress(done: int, total: int) -> None:
            self._done[name] = self._nbytes[name] * (done / total if total else 1.0)
            if self._on_progress is not None:
                self._on_progress(round(sum(self._done.values())), sum(self._nbytes.values()))

        return on_progress
