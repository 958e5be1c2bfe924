"""Checkpoints of version 2 with a record, tables and an index of the attacker's choice, and digests that fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tests.attacks.native_forgery import arrays_in, record_as_written, safetensors_file


class TableForgery:
    """The parts of a checkpoint, to be changed and put back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record: dict[str, Any] = json.loads((folder / "holdfast.json").read_bytes())
        del self.record["check"]
        self.data: list[bytes] = []
        self.tables: list[dict[str, np.ndarray]] = []
        self._names = [file["name"] for file in self.record["files"]]
        for file in self.record["files"]:
            content = (folder / file["name"]).read_bytes()
            self.data.append(content[: file["table"]["begin"]])
            self.tables.append(arrays_in(content[file["table"]["begin"] :]))
        index = self.record.get("index")
        self.index = None if index is None else arrays_in((folder / index["name"]).read_bytes())

    def write(self) -> None:
        """Put it back, with the right digests. Places of tables that are to be wrong have the member ``keep``."""
        for number, (data, table) in enumerate(zip(self.data, self.tables, strict=True)):
            table["check"] = np.zeros(16, "u1")
            body = safetensors_file(table)[:-16]
            check = xxhash.xxh3_128_digest(body)
            (self.folder / self._names[number]).write_bytes(data + body + check)
            if number < len(self.record["files"]):
                file = self.record["files"][number]
                if isinstance(file, dict) and isinstance(file.get("table"), dict) and "keep" not in file:
                    file["table"].update(begin=len(data), bytes=len(body) + 16, xxh3_128=check.hex())
                    file["bytes"] = len(data) + len(body) + 16
        if self.index is not None and isinstance(self.record.get("index"), dict):
            content = safetensors_file(self.index)
            (self.folder / self.record["index"]["name"]).write_bytes(content)
            self.record["index"].update(bytes=len(content), xxh3_128=xxhash.xxh3_128_hexdigest(content))
        body = record_as_written(self.record).encode()
        check = b',"check":"%s"}\n' % xxhash.xxh3_128_hexdigest(body).encode()
        (self.folder / "holdfast.json").write_bytes(body + check)
