"""What is known of a commit while it is being tried."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Commit:
    """One commit, as far as the one who commits knows."""

    may_have_happened: bool = False
