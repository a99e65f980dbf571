"""From what the user names, a directory or an archive, to the files of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from gpustasis.archive.opened import Archive, open_archive
from gpustasis.archive.parents import DirectoryParent, Parent, Parents
from gpustasis.archive.stream import DEFAULT_LIMITS, Limits
from gpustasis.errors import CheckpointError
from gpustasis.image.chain import MAX_DEPTH, chain_directories
from gpustasis.image.files import DirectoryFiles
from gpustasis.image.lock import shared


@contextmanager
def open_files(
    path: Path, parents: Sequence[Path] = (), limits: Limits = DEFAULT_LIMITS
) -> Iterator[DirectoryFiles | Archive]:
    """The checkpoint at `path`, told by what it is: a directory, else an archive.

    parents: directories and archives that hold earlier checkpoints of an archive's chain; of a
    directory, all that the links from it lead to are looked through too.

    Raises ArchiveError, ImageError; CheckpointError if parents are named for a directory.
    """
    if path.is_dir():
        if parents:
            raise CheckpointError(
                f"{path} is a directory: its link says where its parent {parents[0]} has to be"
            )
        yield DirectoryFiles(path)
        return
    with ExitStack() as stack:
        named: list[Parent] = []
        for parent in parents:
            if parent.is_dir():
                directories = chain_directories(parent, MAX_DEPTH)
                stack.enter_context(shared(dict.fromkeys(directories)))
                named += [DirectoryParent(directory) for directory in directories]
            else:
                named.append(stack.enter_context(open_archive(parent, limits=limits)))
        yield stack.enter_context(open_archive(path, Parents(named), limits))
