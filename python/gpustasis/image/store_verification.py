# SPDX-License-Identifier: Apache-2.0
"""Check every checkpoint of a store, to be run by a timer: each image is read once, however many
checkpoints are built on it, at a rate that leaves the disk to others. A run that was killed is
continued from its state file.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpustasis._core import MANIFEST_NAME, Encoding, ImageReader, Manifest, image_name
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.errors import CheckpointError, ImageError, UnsupportedError
from gpustasis.files import replace_file
from gpustasis.image.checkpoint import FoundSource, State, find_sources, image_errors, open_image
from gpustasis.image.directory import share
from gpustasis.image.store import Entry, read_store

_STATE_VERSION = 1
_STATE_LIMIT = 256 << 20  # bytes of a state file
_SLICE_BYTES = 64 << 20  # read between two looks at the clock; less where a rate is set
_SLICES_PER_SECOND = 4  # of a rate
_SHOWN = 8  # damaged chunks of an image that get a sentence each

# Number of a chunk, and what is wrong with it.
Damage = list[tuple[int, str]]
# Name of the checkpoint, bytes of its image that are read, bytes of all that are to be read.
OnSlice = Callable[[str, int, int], object]


@dataclass(slots=True, kw_only=True)
class Verdict:
    """One checkpoint. problems: a sentence each. damaged_chunks: that cannot be used, whichever
    image holds them; damaged_elsewhere: those of them that an earlier checkpoint holds."""

    name: str
    checkpoint_id: bytes | None
    problems: list[str] = field(default_factory=list)
    damaged_chunks: int = 0
    damaged_elsewhere: int = 0


@dataclass(slots=True, kw_only=True)
class StoreVerification:
    """verdicts: parents before what is built on them. ignored: what is no checkpoint, and why.
    read_bytes: of chunks, by this run. continued: it went on where another was killed."""

    verdicts: list[Verdict] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)
    read_bytes: int = 0
    continued: bool = False

    @property
    def damaged(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.problems]


def is_store(directory: Path) -> bool:
    """Whether it is a directory of checkpoints, and none itself."""
    if (directory / MANIFEST_NAME).exists() or (directory / INVENTORY_NAME).exists():
        return False
    try:
        return any((below / MANIFEST_NAME).is_file() for below in directory.iterdir())
    except OSError as exc:
        raise ImageError(f"cannot list {directory}: {exc.strerror}") from exc


def verify_store(
    store: Path,
    *,
    state: Path | None = None,
    rate: int | None = None,
    threads: int = 0,
    on_slice: OnSlice | None = None,
) -> StoreVerification:
    """Check all checkpoints in `store`.

    state: a file where it is noted how far the check has come; one that a killed run left is gone
    on from, and it is removed at the end. rate: bytes of chunks read in a second, at most. threads:
    0 for as many as processors.

    Nothing is raised for what is found. Raises ImageError if the store cannot be listed,
    CheckpointError if the state file is of another store, or cannot be read or written.
    """
    progress = _Progress(store, state)
    return _Run(store, progress, _Throttle(rate), threads, on_slice).run()


def _read_own(path: Path) -> bytes:
    """A file that nobody else could have written: who could would have damaged images called sound.
    Raises OSError; CheckpointError if it is somebody else's, or too long."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.geteuid()) or others:
            raise CheckpointError(f"{path}: is no file that only root or this user can write to")
        raw = file.read(_STATE_LIMIT + 1)
    if len(raw) > _STATE_LIMIT:
        raise CheckpointError(f"{path}: has more than {_STATE_LIMIT} bytes")
    return raw


class _Progress:
    """What is known already, by digest of the image; a file that is kept up to date."""

    def __init__(self, store: Path, path: Path | None) -> None:
        self._path = path
        self._store = str(store.resolve())
        self.checked: dict[str, Damage] = {}
        self.current: tuple[str, int, Damage] = ("", 0, [])  # digest, next chunk, found so far
        self.continued = path is not None and path.exists()
        if self.continued:
            self._read()

    def note(self, digest: str, following: int, damage: Damage) -> None:
        """All chunks before `following` are checked."""
        self.current = (digest, following, damage)
        self._write()

    def finish(self, digest: str, damage: Damage) -> None:
        self.checked[digest] = damage
        self.current = ("", 0, [])
        self._write()

    def remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _read(self) -> None:
        assert self._path is not None
        try:
            raw = json.loads(_read_own(self._path))
            if raw["version"] != _STATE_VERSION or raw["store"] != self._store:
                raise CheckpointError(
                    f"{self._path}: is the state of a check of {raw['store']}, version "
                    f"{raw['version']}, not of {self._store}; name another file"
                )
            self.checked = {str(key): _damage(found) for key, found in raw["checked"].items()}
            digest, following, found = raw["current"]
            self.current = (str(digest), int(following), _damage(found))
        except (
            *(OSError, ValueError, KeyError, TypeError, AttributeError),
            *(RecursionError, OverflowError),
        ) as exc:
            raise CheckpointError(
                f"{self._path}: cannot be used as the state of a check; remove it: {exc}"
            ) from exc

    def _write(self) -> None:
        if self._path is None:
            return
        raw = {
            "version": _STATE_VERSION,
            "store": self._store,
            "checked": self.checked,
            "current": self.current,
        }
        try:
            directory = os.open(self._path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                data = json.dumps(raw).encode()
                replace_file(directory, self._path.name, data, 0o600, durable=False)
            finally:
                os.close(directory)
        except OSError as exc:
            raise CheckpointError(f"cannot write {self._path}: {exc.strerror}") from exc


def _damage(raw: object) -> Damage:
    if not isinstance(raw, list):
        raise TypeError("no list of chunks")
    return [(int(number), str(what)) for number, what in raw]


class _Throttle:
    """Keeps what is read below a rate, in bytes a second; None: there is none."""

    def __init__(self, rate: int | None) -> None:
        self._rate = rate
        self._begin = time.monotonic()
        self._done = 0
        self.slice_bytes = _SLICE_BYTES
        if rate is not None:
            self.slice_bytes = max(1, min(_SLICE_BYTES, rate // _SLICES_PER_SECOND))

    def spent(self, size: int) -> None:
        """Wait until so many bytes more are within the rate."""
        self._done += size
        if self._rate is not None:
            ahead = self._begin + self._done / self._rate - time.monotonic()
            if ahead > 0:
                time.sleep(ahead)


class _Run:
    """One check of a store."""

    def __init__(
        self,
        store: Path,
        progress: _Progress,
        throttle: _Throttle,
        threads: int,
        on_slice: OnSlice | None,
    ) -> None:
        self._store = store
        self._progress = progress
        self._throttle = throttle
        self._threads = threads
        self._tell = on_slice or (lambda name, done, total: None)
        self._found = StoreVerification(continued=progress.continued)
        self._entries: Mapping[str, Entry] = {}

    def run(self) -> StoreVerification:
        self._entries = read_store(self._store)
        for entry in sorted(self._entries.values(), key=_order):
            ignored = _why_ignored(entry)
            if ignored:
                self._found.ignored[entry.name] = ignored
                continue
            verdict = self._verdict(entry)
            if verdict is not None:
                self._found.verdicts.append(verdict)
        self._progress.remove()
        return self._found

    def _verdict(self, entry: Entry) -> Verdict | None:
        """None: it was removed meanwhile."""
        verdict = Verdict(name=entry.name, checkpoint_id=entry.checkpoint_id)
        if entry.manifest is None:
            verdict.problems.append(entry.incomplete)
            return verdict
        try:
            lock = share(entry.directory)
        except ImageError as exc:
            self._found.ignored[entry.name] = str(exc)
            return None
        with lock:
            self._check_images(entry.directory, entry.manifest, verdict)
        return verdict

    def _check_images(self, directory: Path, manifest: Manifest, verdict: Verdict) -> None:
        for task in manifest.tasks:
            if not task.externalized:
                continue
            try:
                image = open_image(directory, manifest, task)
            except (ImageError, UnsupportedError) as exc:
                verdict.problems.append(str(exc))
                continue
            own = self._own_damage(verdict.name, image)
            _add(verdict, directory / image_name(task.pid), own)
            found = find_sources(directory, image.info.sources)
            for number, source in enumerate(found, 1):
                self._check_source(image, number, source, directory, verdict)

    def _check_source(
        self, image: ImageReader, number: int, found: FoundSource, directory: Path, verdict: Verdict
    ) -> None:
        """Chunks of `image` that an earlier checkpoint holds."""
        source = found.source
        name = image_name(source.pid)
        if found.state is not State.RIGHT or found.directory is None:
            verdict.problems.append(
                f"{directory / image_name(image.info.pid)}: {name} of checkpoint "
                f"{source.checkpoint_id.hex()}, {source.depth} before this one, is {found.state}"
            )
            return
        path = found.directory / name
        try:
            with share(found.directory), image_errors():
                owner = ImageReader.open(path)
                damaged = [chunk for chunk, _ in self._own_damage(verdict.name, owner)]
                references = image.find_damaged_references(number, owner, damaged)
        except (ImageError, UnsupportedError) as exc:
            verdict.problems.append(str(exc))
            return
        what = [(chunk, f"{text}, {path}") for chunk, text in references]
        _add(verdict, directory / image_name(image.info.pid), what, elsewhere=True)

    def _own_damage(self, name: str, image: ImageReader) -> Damage:
        """Of the chunks that the file of `image` holds; read once in a run."""
        digest = image.digest.hex()
        if digest in self._progress.checked:
            return self._progress.checked[digest]
        begin, damage = 0, list[tuple[int, str]]()
        if self._progress.current[0] == digest:
            _, begin, damage = self._progress.current
        total = image.file_size
        done = 0
        for first, end, size in self._slices(image):
            done += size
            if end <= begin:
                continue
            damage += image.find_damage(max(first, begin), end, [0], self._threads)
            self._found.read_bytes += size
            self._tell(name, done, total)
            self._progress.note(digest, end, damage)
            self._throttle.spent(size)
        self._progress.finish(digest, damage)
        return damage

    def _slices(self, image: ImageReader) -> Iterator[tuple[int, int, int]]:
        """First chunk, the one behind the last, and bytes to be read."""
        first, size = 0, 0
        for number in range(len(image)):
            chunk = image.chunk(number)
            if chunk.source == 0 and chunk.encoding != Encoding.ZERO:
                size += chunk.stored_size
            if size >= self._throttle.slice_bytes:
                yield first, number + 1, size
                first, size = number + 1, 0
        if first < len(image):
            yield first, len(image), size


def _order(entry: Entry) -> tuple[int, str]:
    """Parents first."""
    return (0 if entry.manifest is None else entry.manifest.chain_length, entry.name)


def _why_ignored(entry: Entry) -> str:
    """Why it is not checked; "": it is, because its dump was finished."""
    if entry.name.startswith("."):
        return "hidden: not done, or not meant for others"
    if not (entry.directory / MANIFEST_NAME).exists():
        return entry.incomplete
    if not (entry.directory / INVENTORY_NAME).is_file():
        return f"no {INVENTORY_NAME}: a dump that is not done or was broken off"
    return ""


def _add(verdict: Verdict, path: Path, damage: Damage, *, elsewhere: bool = False) -> None:
    verdict.damaged_chunks += len(damage)
    verdict.damaged_elsewhere += len(damage) if elsewhere else 0
    verdict.problems += [
        what if what.startswith(str(path)) else f"{path}: {what}" for _, what in damage[:_SHOWN]
    ]
    if len(damage) > _SHOWN:
        verdict.problems.append(f"{path}: and {len(damage) - _SHOWN} damaged chunks more")
