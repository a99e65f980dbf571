# SPDX-License-Identifier: Apache-2.0
"""What a supervisor writes down: of which job a checkpoint is, how long it took, what it needs.

All of it is read again as if somebody else had written it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from gpustasis.errors import ImageError
from gpustasis.files import open_regular, replace_file, sync_directory

RECORD_NAME = "gpustasis-jit.json"
_PREPARED_NAME = ".gpustasis-jit.begun"
VERSION = 1
_LIMIT = 4 << 20  # bytes of a record: a command line has at most 2 MiB
_DIGEST_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What makes two runs the same job.

    command: its words, the program first. directory: where it was started. script: the SHA-256 of
    the Python script among the words, in hexadecimal; "": there is none.
    """

    command: tuple[str, ...]
    directory: str
    script: str

    def difference(self, other: Identity) -> str:
        """In what `other`, that of a checkpoint, is another job; "": it is the same."""
        if other.command != self.command:
            return f"is of another command: {' '.join(other.command)}"
        if other.directory != self.directory:
            return f"is of a job that was started in {other.directory}"
        if other.script != self.script:
            return "is of another version of the script"
        return ""


def identify(command: Sequence[str], script: Path | None) -> Identity:
    """Of a job that is started here. Raises OSError if the script cannot be read."""
    return Identity(
        command=tuple(command),
        directory=os.getcwd(),
        script="" if script is None else _digest(script),
    )


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(_DIGEST_BLOCK):
            found.update(block)
    return found.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Lies in a checkpoint once the dump has succeeded: without it there is no checkpoint.

    pipes: the numbers of the pipes that the job wrote its stdout and stderr to. memory_bytes: what
    its memory was estimated at before the dump. seconds: how long the dump took, from the signal.
    unverified: why the job did not count as back when it was restored last; "": it did, or was not.
    """

    identity: Identity
    pipes: tuple[int, int]
    memory_bytes: int
    seconds: float
    unverified: str = ""

    def write(self, directory: Path) -> None:
        """To the disk, in one step. Raises OSError."""
        self._write(directory, RECORD_NAME)

    def prepare(self, directory: Path) -> None:
        """Have all of it on the disk, under a name that counts for nothing. Raises OSError."""
        self._write(directory, _PREPARED_NAME)

    def commit(self, directory: Path) -> None:
        """From now on there is a checkpoint. Raises OSError."""
        os.rename(directory / _PREPARED_NAME, directory / RECORD_NAME)
        sync_directory(directory)

    def _write(self, directory: Path, name: str) -> None:
        raw = json.dumps({"version": VERSION, **asdict(self)}).encode()
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            replace_file(descriptor, name, raw, 0o600)
        finally:
            os.close(descriptor)

    @classmethod
    def parse(cls, raw: object) -> Self:
        """Raises TypeError, KeyError or ValueError."""
        body = _mapping(raw)
        if body["version"] != VERSION:
            raise ValueError(f"version {body['version']!r}, this one reads {VERSION}")
        whose = _mapping(body["identity"])
        first, second = (_number(each) for each in _sequence(body["pipes"]))
        seconds = body["seconds"]
        if not isinstance(seconds, int | float) or not math.isfinite(seconds) or seconds < 0:
            raise ValueError(f"seconds are {seconds!r}")
        return cls(
            identity=Identity(
                command=tuple(_text(word) for word in _sequence(whose["command"])),
                directory=_text(whose["directory"]),
                script=_text(whose["script"]),
            ),
            pipes=(first, second),
            memory_bytes=_number(body["memory_bytes"]),
            seconds=float(seconds),
            unverified=_text(body.get("unverified", "")),
        )


def read_record(directory: Path) -> Record | None:
    """None: there is none. Raises ImageError if it cannot be used."""
    raw = read_json(directory / RECORD_NAME)
    try:
        return None if raw is None else Record.parse(raw)
    except (TypeError, KeyError, ValueError) as exc:
        raise ImageError(f"{directory / RECORD_NAME} is damaged: {exc!r}") from exc


def read_json(path: Path) -> object:
    """None: there is no such file. Raises ImageError."""
    try:
        with open_regular(path, os.O_NOFOLLOW) as file:
            text = file.read(_LIMIT + 1)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise ImageError(f"cannot read {path}: {exc.strerror}") from exc
    if len(text) > _LIMIT:
        raise ImageError(f"{path} is damaged: it has more than {_LIMIT} bytes")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ImageError(f"{path} is damaged: {exc}") from exc


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.80} is no object")
    return value


def _sequence(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.80} is no list")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is no text")
    return value


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.80} is no number of bytes or of a file")
    return value
