"""An image directory while it is made: beside its place, under a hidden name, nobody else's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpustasis.errors import CheckpointError
from gpustasis.image.lock import try_exclude

INVENTORY_NAME = "inventory.img"  # without it CRIU restores nothing


def require_free(out: Path) -> None:
    """Raise CheckpointError unless `out` is not there, or an empty directory."""
    if not out.is_symlink() and not out.exists():
        return
    if out.is_symlink() or not out.is_dir() or any(out.iterdir()):
        raise CheckpointError(f"{out} is there already and no empty directory; name another one")


@contextmanager
def building_place(out: Path) -> Iterator[Path]:
    """An empty directory beside `out`, nobody else's, to be renamed; removed on any error."""
    place = out.absolute().with_name(f".{out.absolute().name}.part")
    try:
        place.mkdir(mode=0o700, exist_ok=True)
    except OSError as exc:
        raise CheckpointError(f"cannot make {place}: {exc.strerror}") from exc
    lock = try_exclude(place)
    if lock is None:
        raise CheckpointError(f"another process is writing {out}")
    with lock:
        try:
            _empty(place)
            yield place
        except BaseException as exc:
            shutil.rmtree(place, ignore_errors=True)
            if isinstance(exc, OSError):
                raise CheckpointError(f"cannot write {out}: {exc}") from exc
            raise


def _empty(place: Path) -> None:
    """The inventory goes first: what is half removed must not look whole either."""
    (place / INVENTORY_NAME).unlink(missing_ok=True)
    for path in list(place.iterdir()):
        path.unlink()


def sync_directory(directory: Path) -> None:
    """Have the names in `directory` on the disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
