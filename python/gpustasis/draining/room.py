# SPDX-License-Identifier: Apache-2.0
"""Arenas: a tmpfs made for one, what lies in it, and a checkpoint that is given up.

Source: tmpfs(5); Linux Documentation/filesystems/tmpfs.rst, huge= and noswap (6.4).
"""

from __future__ import annotations

import fcntl
import logging
import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from gpustasis import _core, process
from gpustasis._core import (
    ARENA_MARKER,
    ARENA_OWNER,
    MANIFEST_NAME,
    ArenaMarker,
    read_arena_owner,
)
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.draining.recycle import (
    POOL,
    RESERVED,
    Kept,
    Unread,
    arena_of,
    give_up,
    is_name,
    look_into,
    recycle,
    size_of,
    without_child,
)
from gpustasis.errors import CheckpointError, ImageError, UnsupportedError
from gpustasis.image.arena import (
    Tier,
    arena_alone,
    by_descriptor,
    find_marker,
    images_of,
    note_over,
    own_marker,
    tier_of,
)
from gpustasis.image.directory import is_there, try_exclude

log = logging.getLogger(__name__)

ARENA = Path("/run/gpustasis/arena")  # src/cuda_plugin/config.hpp
_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """kept: checkpoints, oldest first. unread: directories of which it cannot be told whose they
    are. pool_bytes: of files that the next dumps write into."""

    arena: Path
    kept: tuple[Kept, ...]
    unread: tuple[Unread, ...]
    pool_bytes: int


def contents_of(arena: Path) -> Contents:
    """Raises ImageError if it is no arena, or cannot be read."""
    try:
        _core.require_arena(arena)
        found = look_into(arena)
    except (OSError, ValueError) as exc:
        raise ImageError(str(exc)) from exc
    kept = sorted(found.kept, key=lambda one: (one.owner.time, one.directory.name))
    return Contents(
        arena=arena,
        kept=tuple(kept),
        unread=tuple(found.unread),
        pool_bytes=size_of(arena / POOL),
    )


def tier_in(one: Kept) -> Tier | None:
    """Of a checkpoint in an arena. Durable: it is there because others are built on it. None: what
    is at its image directory is not that checkpoint, or cannot be read."""
    wanted = one.owner.checkpoint_id
    try:
        with images_of(one.owner) as images:
            if images is None:
                return None
            marker = find_marker(images)
            if marker is not None and marker.checkpoint_id == wanted:
                return tier_of(images)
            return Tier.DURABLE if _core.read_manifest(images).checkpoint_id == wanted else None
    except (OSError, ValueError, NotImplementedError, CheckpointError):
        return None


def create(arena: Path, size: int) -> str:
    """Mount a tmpfs of `size` bytes at `arena`, with huge pages where this kernel has them, and
    without swap; its options. Raises CheckpointError if something is there already,
    UnsupportedError if the kernel refuses."""
    try:
        arena.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise CheckpointError(f"cannot make {arena}: {exc.strerror}") from exc
    # A dump that has begun meanwhile would write into what is hidden then: it looks for its
    # directory when it has the lock.
    with arena_alone(arena):
        return _mount(arena, size)


def _mount(arena: Path, size: int) -> str:
    if os.path.ismount(arena):
        raise CheckpointError(f"{arena} is a mount point already")
    try:
        if any(arena.iterdir()):
            raise CheckpointError(
                f"{arena} is not empty: a tmpfs would hide what is in it; drain, or discard, its "
                f"checkpoints, and run `gpustasis arena clean --pool --arena {arena}`"
            )
    except OSError as exc:
        raise CheckpointError(f"cannot read {arena}: {exc.strerror}") from exc
    base = f"size={size},mode=0700,nosuid,nodev,noexec"
    # What an older kernel does not know is left out, and the answer says what was taken.
    choices = [f"{base},huge=within_size", base] if _HUGE.exists() else [base]
    refused = ""
    for options in [f"{one},noswap" for one in choices] + choices:
        done = process.run(
            ["mount", "-t", "tmpfs", "-o", options, "gpustasis-arena", str(arena)],
            timeout_s=_TIMEOUT_S,
        )
        if done.status == 0:
            return options
        refused = done.output.strip()
    raise UnsupportedError(f"cannot mount a tmpfs at {arena}: {refused}")


def dump_is_at_work(directory: Path, arena: Path) -> bool:
    """Whether the dump into `directory`, whose images go to the directory `arena` of an arena, has
    not ended. criu holds the marker's lock meanwhile, as a drain does later; but room is reserved
    from before the manifest is there until the dump has succeeded."""
    is_written = is_there(arena / MANIFEST_NAME) and is_there(directory / INVENTORY_NAME)
    if is_written and not is_there(arena / RESERVED):
        return False
    try:
        fd = os.open(directory / ARENA_MARKER, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True  # it has failed just now: the next look tells
    except OSError as exc:
        raise ImageError(f"cannot open {directory / ARENA_MARKER}: {exc.strerror}") from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def empty_pool(arena: Path) -> int:
    """Remove the files that the next dumps would write into, and their directory; bytes of memory
    that they had. Raises CheckpointError if a dump is under way, which counts on them, or if one
    may be, or if they cannot be removed."""
    with arena_alone(arena):
        found = look_into(arena)
        for unread in found.unread:  # a later version may say in another way that it is at work
            raise CheckpointError(
                f"a dump into {unread.directory} may be under way, and need what is in "
                f"{arena / POOL}: that cannot be told: {unread.problem}"
            )
        for one in found.kept:
            if is_there(one.directory / RESERVED) and is_held(one.directory):
                raise CheckpointError(
                    f"a dump into {one.images} is under way, and may need what is in "
                    f"{arena / POOL}: clean it when that has ended"
                )
        freed = 0
        try:
            with suppress(FileNotFoundError), os.scandir(arena / POOL) as items:
                for item in items:
                    size = item.stat(follow_symlinks=False).st_blocks * 512
                    os.unlink(item.path)
                    freed += size
            with suppress(FileNotFoundError):
                (arena / POOL).rmdir()
        except OSError as exc:
            raise CheckpointError(f"cannot empty {arena / POOL}: {exc.strerror}") from exc
    return freed


def is_held(directory: Path) -> bool:
    """Whether a process uses it: a lock on it says so."""
    lock = try_exclude(directory)
    if lock is not None:
        lock.close()
    return lock is None


def discard(checkpoint: Path, arena: Path = ARENA) -> Path:
    """Give up a checkpoint, which is only in memory: its directory in the arena, which the next
    dump may use.

    checkpoint: its image directory; if that is gone, its directory in an arena, or the name of that
    in `arena`, which is the checkpoint's id in hex. Raises ImageError if it is durable or there is
    none; CheckpointError if a drain or its dump is at work, or another checkpoint is built on it;
    and of a directory in an arena if a process needs what is in it.
    """
    kept = _in_arena(checkpoint, arena)
    if kept is not None:
        give_up(kept)
        recycle(kept.parent)  # what it was built on
        return kept
    # Others could put another directory in its place in between, whose marker would be removed.
    with ExitStack() as held:
        try:
            inside = held.enter_context(by_descriptor(checkpoint))
        except OSError as exc:
            raise ImageError(f"cannot open {checkpoint}: {exc.strerror}") from exc
        marker, is_noted = _give_up_marker(inside)
    if (found := arena_of(marker)) is not None:
        recycle(found)
    stored = Path(marker.directory)
    if found is not None and not is_noted:
        try:
            why = f"it is that of the checkpoint in {read_arena_owner(stored).images}, or in use"
        except FileNotFoundError:
            return stored  # it is gone
        except (OSError, ValueError, NotImplementedError) as exc:
            why = str(exc) or repr(exc)
        text = "the marker of %s is removed, and the memory in %s stays: %s"
        log.warning(text, checkpoint, stored, why)
    return stored


def _give_up_marker(checkpoint: Path) -> tuple[ArenaMarker, bool]:
    """What it has said, and whether its memory is known to be of no use. Raises as discard."""
    marker = find_marker(checkpoint)
    if marker is None or is_there(checkpoint / MANIFEST_NAME):
        raise ImageError(f"{checkpoint} holds no checkpoint that is only in memory")
    path = checkpoint / ARENA_MARKER
    try:
        with own_marker(checkpoint, marker.checkpoint_id) as own:
            if own is None:
                raise CheckpointError(f"{path} was replaced a moment ago: a dump is at work")
            if is_there(checkpoint / MANIFEST_NAME):
                raise ImageError(f"{checkpoint} was drained a moment ago: it is durable")
            with without_child(checkpoint, marker):
                own.unlink()
            is_noted = note_over(checkpoint, marker)
    except BlockingIOError as exc:
        raise CheckpointError(f"{path} is locked: a drain or a dump is at work") from exc
    except OSError as exc:
        raise CheckpointError(f"cannot remove {path}: {exc.strerror}") from exc
    return marker, is_noted


def _in_arena(checkpoint: Path, arena: Path) -> Path | None:
    """The directory in an arena that is meant; None: `checkpoint` is an image directory."""
    if is_there(checkpoint / ARENA_OWNER) and not is_there(checkpoint / ARENA_MARKER):
        return checkpoint.absolute()
    if is_name(str(checkpoint)) and not is_there(checkpoint):
        return arena / checkpoint
    return None
