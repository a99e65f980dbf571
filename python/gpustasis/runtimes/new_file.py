"""A file that is written under another name and gets its own when it is whole."""

from __future__ import annotations

import os
from pathlib import Path


def give_name(part: Path, path: Path) -> None:
    """Make the synced file `part` be `path`, beside it, to stay so whatever happens next.

    Raises OSError: FileExistsError if something has that name by now; `part` is still there then.
    """
    os.link(part, path)  # unlike a rename, it takes no other's place
    part.unlink()
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
