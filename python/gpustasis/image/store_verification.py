# SPDX-License-Identifier: Apache-2.0
"""Check every checkpoint of a store, to be run by a timer: each image is read once, however many
others refer to it, at a rate that leaves the disk to others. A run that was killed is
continued from its state file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpustasis._core import (
    ARENA_MARKER,
    MANIFEST_NAME,
    SEALED_NAME,
    Encoding,
    ImageReader,
    Manifest,
)
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.errors import ImageError, UnsupportedError
from gpustasis.image.arena import stored_directory
from gpustasis.image.checkpoint import (
    FoundSource,
    State,
    find_manifest,
    find_sources,
    image_errors,
    is_sealed,
    open_image,
    whose,
)
from gpustasis.image.directory import is_file, is_there, share
from gpustasis.image.found_damage import SHOWN, Damage, Progress
from gpustasis.image.pack import verify_pack
from gpustasis.image.store import Entry, read_store
from gpustasis.image.verification import Stored, require_all_in, require_no_manifest

_SLICE_BYTES = 64 << 20  # read between two looks at the clock; less where a rate is set
_SLICES_PER_SECOND = 4  # of a rate

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
    read_bytes: of chunks, by this run. continued: it went on where another was killed.
    state_problem: why the state file is still there; "": it is not."""

    verdicts: list[Verdict] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)
    read_bytes: int = 0
    continued: bool = False
    state_problem: str = ""

    @property
    def damaged(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.problems]


def is_store(directory: Path) -> bool:
    """Whether it is a directory of checkpoints, and none itself."""
    if any(os.path.lexists(directory / name) for name in (MANIFEST_NAME, INVENTORY_NAME)):
        return False
    try:
        return any(
            os.path.isfile(below / name)
            for below in directory.iterdir()
            for name in (MANIFEST_NAME, SEALED_NAME, ARENA_MARKER)
        )
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
    progress = Progress(store, state)
    return _Run(store, progress, _Throttle(rate), threads, on_slice).run()


def _key(image: ImageReader, path: Path) -> str:
    """Of an image and the very file it lies in: a copy has the same digest, but its own damage."""
    try:
        found = path.stat()
    except OSError as exc:
        raise ImageError(f"cannot read {path}: {exc.strerror}") from exc
    return f"{image.digest.hex()}:{found.st_dev}:{found.st_ino}:{found.st_ctime_ns}"


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
        progress: Progress,
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
            verdict = self._verdict_or_ignored(entry)
            if verdict is not None:
                self._found.verdicts.append(verdict)
        self._found.state_problem = self._progress.remove()
        return self._found

    def _verdict_or_ignored(self, entry: Entry) -> Verdict | None:
        """None: it is among those ignored."""
        try:
            ignored = _why_ignored(entry) or self._why_elsewhere(entry)
        except ImageError as exc:  # what cannot be looked at is not "whole"
            return Verdict(name=entry.name, checkpoint_id=entry.checkpoint_id, problems=[str(exc)])
        if ignored:
            self._found.ignored[entry.name] = ignored
            return None
        return self._verdict(entry)

    def _why_elsewhere(self, entry: Entry) -> str:
        """Why it need not be checked here; "": it must. A link out of the store is followed, and
        one to what is not checked by its own name. Raises ImageError."""
        target = entry.target
        if target is None or target.parent != self._store.resolve():
            return ""
        there = self._entries.get(target.name)
        if there is None or there.target is not None or _why_ignored(there):
            return ""
        return f"a link to {target.name}, which is checked itself"

    def _verdict(self, entry: Entry) -> Verdict | None:
        """None: it was removed meanwhile."""
        verdict = Verdict(name=entry.name, checkpoint_id=entry.checkpoint_id)
        manifest = entry.manifest
        if manifest is None:
            verdict.problems.append(entry.incomplete)
            return verdict
        try:
            stored = stored_directory(entry.directory)
            lock = share(stored)
            if entry.stored != stored:  # drained meanwhile: its images are other files
                manifest = find_manifest(entry.directory) or manifest
        except ImageError as exc:
            if not os.path.lexists(entry.directory):
                self._found.ignored[entry.name] = str(exc)
                return None
            verdict.problems.append(str(exc))  # it could not be looked at: that is not "whole"
            return verdict
        with lock:
            self._check_images(entry.directory, stored, manifest, verdict)
        return verdict

    def _check_images(
        self, directory: Path, place: Path, manifest: Manifest, verdict: Verdict
    ) -> None:
        """place: of the images."""
        stored: Stored = []
        for task in manifest.tasks:
            if not task.externalized:
                stored.append((task, []))
                continue
            path = place / task.image_name
            try:
                image = open_image(place, manifest, task)
                own = self._own_damage(verdict.name, image, path)
                found = find_sources(place, image.info.sources)
            except (ImageError, UnsupportedError) as exc:
                verdict.problems.append(str(exc))
                continue
            stored.append((task, image.info.regions))
            _add(verdict, path, own.count(), own.texts)
            for number, source in enumerate(found, 1):
                self._check_source(image, number, source, place, verdict)
        try:
            verify_pack(directory, manifest)  # all at once: what CRIU writes itself is small
        except (ImageError, UnsupportedError) as exc:
            verdict.problems.append(str(exc))
        if len(stored) == len(manifest.tasks):  # else it was told what is missing
            try:
                require_all_in(directory, stored)
            except ImageError as exc:
                verdict.problems.append(str(exc))

    def _check_source(
        self, image: ImageReader, number: int, found: FoundSource, directory: Path, verdict: Verdict
    ) -> None:
        """Chunks of `image` that another image holds."""
        source = found.source
        name = source.image_name
        if found.state is not State.RIGHT or found.directory is None:
            verdict.problems.append(
                f"{directory / image.info.image_name}: {whose(source)}, is {found.state}"
            )
            return
        path = found.directory / name
        try:
            with share(found.directory), image_errors():
                owner = ImageReader.open(path)
                damaged = self._own_damage(verdict.name, owner, path).numbers()
                references = image.find_damaged_references(number, owner, damaged)
        except (ImageError, UnsupportedError) as exc:
            verdict.problems.append(str(exc))
            return
        verdict.damaged_elsewhere += len(references) if source.depth else 0
        what = [f"{text}, {path}" for _, text in references[:SHOWN]]
        _add(verdict, directory / image.info.image_name, len(references), what)

    def _own_damage(self, name: str, image: ImageReader, path: Path) -> Damage:
        """Of the chunks that the file of `image`, at `path`, holds; read once in a run. Raises
        ImageError."""
        key = _key(image, path)
        if key in self._progress.checked:
            return self._progress.checked[key]
        begin, damage = 0, Damage()
        if self._progress.current[0] == key:
            _, begin, damage = self._progress.current
        total = image.file_size
        done = 0
        for first, end, size in self._slices(image):
            done += size
            if end <= begin:
                continue
            damage.add(image.find_damage(max(first, begin), end, [0], self._threads))
            self._found.read_bytes += size
            self._tell(name, done, total)
            self._progress.note(key, end, damage)
            self._throttle.spent(size)
        self._progress.finish(key, damage)
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
    """Why it is not checked; "": it is, because its dump was finished. Raises ImageError if that
    cannot be told, or if it was a checkpoint of ours and has lost its manifest."""
    if entry.name.startswith("."):
        return "hidden: not done, or not meant for others"
    if not is_there(stored_directory(entry.directory) / MANIFEST_NAME):
        if is_file(entry.directory / INVENTORY_NAME) and not is_sealed(entry.directory):
            require_no_manifest(entry.directory)
        return entry.closed
    if not is_file(entry.directory / INVENTORY_NAME):
        return f"no {INVENTORY_NAME}: a dump that is not done or was broken off"
    return ""


def _add(verdict: Verdict, path: Path, count: int, texts: Sequence[str]) -> None:
    """So many damaged chunks of the image at `path`; texts: what is wrong with the first few."""
    verdict.damaged_chunks += count
    verdict.problems += [
        what if what.startswith(str(path)) else f"{path}: {what}" for what in texts
    ]
    if count > len(texts):
        verdict.problems.append(f"{path}: and {count - len(texts)} damaged chunks more")
