# SPDX-License-Identifier: Apache-2.0
"""Streams of sealed checkpoints: which files go in which order, and who opens them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from gpustasis._core import (
    ENVELOPE_NAME,
    MANIFEST_NAME,
    PACK_NAME,
    SEALED_NAME,
    SIGNATURE_NAME,
    STATEMENT_NAME,
    is_sealed_name,
)
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.errors import CheckpointError, ImageError, SealError, StreamError, UnsupportedError
from gpustasis.image.checkpoint import (
    NO_PARENT,
    CheckpointFiles,
    DirectoryFiles,
    find_manifest,
    is_image_name,
    require_not_sealed,
)
from gpustasis.image.pack import is_read_early
from gpustasis.image.verification import OnProgress, require_no_manifest, verify_directory
from gpustasis.sealing.directory import open_key
from gpustasis.sealing.files import SealedFiles, verify_sealed
from gpustasis.sealing.keys import KeySource
from gpustasis.streaming.answers import Answers, Replies

_MOST_PROBLEMS = 3  # in one message


def require_opened(answers: Answers) -> None:
    """Before anything is frozen: raise StreamError unless the receiver has a key."""
    if not answers.opens_sealed:
        raise StreamError(
            f"{answers.place} opens nothing that is sealed: it was given no key (`restore -i` "
            "takes --key or --key-command), or is too old"
        )


def require_fit(name: str, sealed: bool) -> None:
    """Raise StreamError for a file that has no place in such a stream: what is sealed where nobody
    was told, and what should have been."""
    if sealed and (is_image_name(name) or name in (MANIFEST_NAME, PACK_NAME)):
        raise StreamError(f"{name} is in the clear, in a stream of what is sealed")
    if not sealed and is_sealed_name(name):
        raise StreamError(
            f"{name} is of a sealed checkpoint, in a stream that does not say so: name the "
            "recipients with --to or in gpustasis's configuration, and nowhere else"
        )


def next_files(paths: Iterable[Path], sealed: bool) -> list[Path]:
    """Those that have their last content while the dump is still at work: these get their names
    when they are complete. The envelope comes first."""
    found = {path.name: path for path in paths}
    if not sealed:
        return [found[name] for name in sorted(found) if is_image_name(name)]
    if ENVELOPE_NAME not in found:
        return []
    return [found[ENVELOPE_NAME]] + [
        found[name]
        for name in sorted(found)
        if is_sealed_name(name) and name not in (ENVELOPE_NAME, SEALED_NAME)
    ]


def in_order(paths: Iterable[Path]) -> list[Path]:
    """Of a dump that is complete: the envelope first, the inventory last, as it was written."""
    return sorted(
        paths,
        key=lambda path: (path.name == INVENTORY_NAME, path.name != ENVELOPE_NAME, path.name),
    )


class Opening:
    """What a receiver does with the files of one stream, sealed or not.

    source: what opens an envelope; None: there is nothing. place: the stream, for messages.
    """

    def __init__(self, source: KeySource | None, replies: Replies, place: str) -> None:
        self._source = source
        self._replies = replies
        self._place = place
        self._sealed = False
        self._first = True
        self._files: Callable[[Path], SealedFiles] | None = None

    @property
    def has_key(self) -> bool:
        """It opens what is sealed, if it is for this key."""
        return self._source is not None

    def begin(self, sealed: bool) -> None:
        """Raise SealError for a stream that cannot be opened."""
        self._sealed = sealed
        if sealed and self._source is None:
            raise SealError(
                f"{self._place} is sealed, and there is no key: --key FILE, --key-command, or "
                "private_key in gpustasis's configuration"
            )

    def require(self, name: str) -> None:
        """Raise StreamError for a file that may not come, or not now."""
        require_fit(name, self._sealed)
        if self._sealed and self._first and name != ENVELOPE_NAME:
            raise StreamError(f"{self._place} is sealed, and does not begin with {ENVELOPE_NAME}")
        self._first = False

    def took(self, part: Path, name: str) -> None:
        """`name` is complete. The envelope is opened at once: with another key nothing else need
        come, and the dump at the other end ends early. Raises SealError."""
        if not self._sealed or name != ENVELOPE_NAME:
            return
        assert self._source is not None
        with self._replies.steps("opening", lambda: int(time.monotonic())):
            try:
                key = open_key(part, self._source)
            except CheckpointError as exc:
                exc.args = (str(exc).replace(str(part / name), f"{self._place}: {name}"),)
                raise
        self._files = lambda directory: SealedFiles(directory, key)

    def verify(self, part: Path, on_progress: OnProgress) -> CheckpointFiles:
        """As `gpustasis verify` does; of a checkpoint without GPU memory there is nothing to. What
        is sealed is decrypted for it, and nothing of that is written. Raises StreamError, or
        ImageError."""
        if not (part / INVENTORY_NAME).exists():
            raise StreamError(f"{self._place} holds no {INVENTORY_NAME}: it is no checkpoint")
        if self._sealed:
            return self._verify_sealed(part, on_progress)
        require_not_sealed(part)
        files = DirectoryFiles(part)
        manifest = find_manifest(part)
        if manifest is None:
            try:
                require_no_manifest(part)
            except ImageError as exc:
                raise self._damaged(part, str(exc)) from exc
            return files
        if manifest.parent_id != NO_PARENT:  # it would take memory of what is stored here
            raise StreamError(
                f"{self._place} is built on an earlier checkpoint, and a stream holds a whole one"
            )
        problems = verify_directory(part, on_progress=on_progress).problems
        if problems:
            raise self._damaged(part, "; ".join(problems[:_MOST_PROBLEMS]))
        return files

    def _verify_sealed(self, part: Path, on_progress: OnProgress) -> SealedFiles:
        if self._files is None:
            raise StreamError(f"{self._place} is sealed, and holds no {ENVELOPE_NAME}")
        try:
            files = self._files(part)
            verify_sealed(files, on_progress)
            self._require_nothing_else(part, files)
        except (ImageError, UnsupportedError) as exc:
            raise self._damaged(part, str(exc)) from exc
        return files

    def _require_nothing_else(self, part: Path, files: SealedFiles) -> None:
        """Where CRIU's images are sealed, a file in the clear belongs to nothing."""
        for path in sorted(part.iterdir()):
            known = is_sealed_name(path.name) or is_read_early(path.name)
            known = known or path.name in (STATEMENT_NAME, SIGNATURE_NAME)
            if INVENTORY_NAME in files.names and not known:
                raise SealError(f"{path} is in the clear, in a stream of what is sealed")

    def _damaged(self, part: Path, why: str) -> StreamError:
        return StreamError(f"{self._place}: {why}".replace(f"{part}/", ""))
