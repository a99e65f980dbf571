# SPDX-License-Identifier: Apache-2.0
"""The public Python API, which the command line itself uses: `import gpustasis` has all of it.

    done = gpustasis.checkpoint(pid, "monday", leave_running=True)
    later = gpustasis.checkpoint(pid, "tuesday", parent=done)
    assert not later.verify().problems
    later.restore()

Names in gpustasis.__all__ keep their meaning; new ones may come, and new keyword arguments. Sizes
are in bytes, times in seconds where the name says nothing else. Every error that is expected is a
gpustasis.CheckpointError; docs/errors.md lists its subclasses. Checkpoint and restore need root.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypedDict, Unpack

from gpustasis.archive.flatten import flatten_archive
from gpustasis.archive.opened import Archive, inspect_archive, open_files
from gpustasis.archive.verification import verify_archive
from gpustasis.criu import run
from gpustasis.criu.find import find
from gpustasis.criu.images import prepare_directory
from gpustasis.criu.plugin import Setting, driver_libraries
from gpustasis.criu.run import Run
from gpustasis.driver import Driver
from gpustasis.dump_records import find_images
from gpustasis.dumped import is_sealed
from gpustasis.errors import CheckpointError, ImageError
from gpustasis.image.checkpoint import find_manifest, has_gpu_state, require_restorable
from gpustasis.image.difference import Difference, compare_files
from gpustasis.image.flatten import Flattened, flatten
from gpustasis.image.inspection import Inspection, inspect_files
from gpustasis.image.prune import Outcome as Pruned
from gpustasis.image.prune import Rules
from gpustasis.image.prune import prune as prune_store
from gpustasis.image.requirements import RequirementsView, find_requirements
from gpustasis.image.verification import Verification, verify_directory
from gpustasis.recovery import Recovery, find_unharmed
from gpustasis.recovery import recover as recover_task
from gpustasis.sealing.directory import key_for_criu, open_key
from gpustasis.sealing.files import find_manifest_with, manifest_opener
from gpustasis.sealing.keys import KeySource, Remembered

log = logging.getLogger(__name__)

StrPath = str | os.PathLike[str]


class CriuOptions(TypedDict, total=False):
    """What checkpoint and restore share; the first four are CRIU's, by its names.

    shell_job: the root is not the leader of its session; found out unless given. tcp_established:
    keep open TCP connections. tcp_close: they are closed at the restore. file_locks: keep file
    locks. threads: that move memory; 0: one for each processor. criu: the program, or a root
    directory that holds one. work_dir: where CRIU puts log and statistics; else the image
    directory. criu_args: further arguments for CRIU. on_line: is told each line of CRIU's log as it
    comes.
    """

    shell_job: bool | None
    tcp_established: bool
    tcp_close: bool
    file_locks: bool
    threads: int | None
    criu: str | None
    work_dir: Path | None
    criu_args: Sequence[str]
    on_line: Callable[[str], None] | None


class RestoreOptions(CriuOptions, total=False):
    """detached: return when the tree runs (as by default); else when its root has ended.
    leave_stopped: the tree is left stopped; not with detached=False, and not with GPU memory in it,
    which comes back through threads of its processes that run. pidfile: a file, not there yet, that
    the root's pid is written to. key: what opens a checkpoint which was sealed while it was
    made: a private key (PEM), or a source of keys (gpustasis.sealing.keys). gpu_map: "OLD=NEW"
    each: what was on GPU OLD of the checkpoint goes to GPU NEW of this machine, by UUID or number.
    ignore_requirements: go on although files
    that the tree had mapped have changed, the driver is older, or GPU memory is short; CRIU's own
    checks remain."""

    detached: bool
    leave_stopped: bool
    pidfile: StrPath | None
    key: StrPath | KeySource | None
    gpu_map: Sequence[str]
    ignore_requirements: bool


class Checkpoint:
    """A checkpoint: an image directory, or an archive of a container engine.

    path: where it is. parents: of an archive, where earlier checkpoints are that it is built on;
    a directory is followed to its own parents. dump: how it was made, if checkpoint() has made it.
    Nothing is read before a method is called.
    """

    def __init__(
        self, path: StrPath, parents: Sequence[StrPath] = (), *, dump: Run | None = None
    ) -> None:
        self.path = Path(path)
        self.parents = tuple(map(Path, parents))
        self.dump = dump

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r})"

    def restore(self, **options: Unpack[RestoreOptions]) -> Run:
        """Restore the process tree and let it run on; of an image directory only.

        Raises CriuError if CRIU or the plugin failed: nothing of the tree is left running then.
        ImageError if this is no checkpoint.
        """
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path} is no image directory; restore an archive with its container engine, "
                "or flatten it and restore that"
            )
        detached = options.pop("detached", True)
        leave_stopped = options.pop("leave_stopped", False)
        if leave_stopped and not detached:
            raise CheckpointError(
                "a tree that is left stopped cannot be waited for: detached=False"
            )
        require_restorable(self.path)
        pidfile, key = options.pop("pidfile", None), options.pop("key", None)
        if key is not None and not isinstance(key, str | os.PathLike):
            key = Remembered(key)
        manifest = find_manifest_with(self.path, key) if leave_stopped else None
        if manifest is not None and has_gpu_state(manifest):
            raise CheckpointError(
                f"{self.path} holds GPU state, which the driver restores through threads of the "
                "processes: it cannot be restored with --leave-stopped"
            )
        plugin: dict[str, Setting | None] = {
            "gpu_map": tuple(options.pop("gpu_map", ())) or None,
            "requirements": "ignore" if options.pop("ignore_requirements", False) else None,
        }
        with key_for_criu(self.path, key) as (plugin["private_key"], handed_on):
            return run.restore(
                find(options.get("criu")),
                self.path,
                replace(_settings(options, plugin, {}), pass_fds=handed_on),
                detached=detached,
                leave_stopped=leave_stopped,
                pidfile=None if pidfile is None else Path(pidfile),
            )

    def verify(
        self, *, threads: int = 0, on_progress: Callable[[str, int, int], object] | None = None
    ) -> Verification:
        """Check every byte of our images and the manifest; what is wrong is in `problems`.

        threads: 0: one for each processor. on_progress: told a file's name, the bytes of memory
        that are done of it, and how many it has. Raises ImageError if nothing can be read.
        """
        with open_files(self.path, self.parents) as files:
            if isinstance(files, Archive):
                return verify_archive(files, threads, on_progress)
            return verify_directory(files.directory, threads, on_progress)

    def inspect(self) -> Inspection:
        """What it holds: processes, memory, sizes and times. Memory is not checked.

        Raises ImageError if what is read is damaged.
        """
        with open_files(self.path, self.parents) as files:
            return inspect_archive(files) if isinstance(files, Archive) else inspect_files(files)

    def requirements(self) -> RequirementsView | None:
        """What a restore needs: driver stack, GPUs and their memory, mapped files. None: it holds
        nothing that gpustasis saved.

        Raises ImageError if what is read is damaged.
        """
        with open_files(self.path, self.parents) as files:
            return find_requirements(files, inspect_files(files))

    def flatten(
        self,
        out: StrPath,
        *,
        threads: int = 0,
        unpacked: bool = False,
        on_file: Callable[[str], object] | None = None,
    ) -> Flattened:
        """Write a copy to `out` that needs no earlier checkpoint; of an archive its images.

        out: a directory that does not exist, or is empty. on_file: told each file's name before
        it is written. unpacked: CRIU's images as CRIU wrote them, also where they are packed; not
        of an archive. Raises ImageError if the checkpoint or its chain is damaged.
        """
        with open_files(self.path, self.parents) as files:
            if not isinstance(files, Archive):
                directory = files.directory
                return flatten(directory, Path(out), on_file, threads=threads, unpacked=unpacked)
            if unpacked:
                raise CheckpointError(
                    f"{self.path} is an archive: flatten it to a directory, and that one unpacked"
                )
            return flatten_archive(files, Path(out), on_file, threads=threads)

    def diff(self, other: StrPath) -> Difference:
        """What changed in GPU memory, and in CPU memory that is in images of ours, from this
        checkpoint to `other`; only indexes are read.

        Raises ImageError if one is damaged or they have chunks of different sizes.
        """
        with open_files(self.path) as before, open_files(Path(other)) as after:
            return compare_files(before, after)


def checkpoint(
    pid: int,
    directory: StrPath,
    *,
    parent: StrPath | None = None,
    whole: bool = False,
    leave_running: bool = False,
    leave_stopped: bool = False,
    externalize: bool | None = None,
    cpu_memory: str | None = None,
    layout: str | None = None,
    tier: str | None = None,
    recipients: Sequence[StrPath] = (),
    key: StrPath | None = None,
    compress: str | None = None,
    max_chain: int | None = None,
    ghost_limit: int | None = None,
    skip_in_flight: bool = False,
    link_remap: bool = False,
    **options: Unpack[CriuOptions],
) -> Checkpoint:
    """Dump the process tree below `pid`, GPU memory included, into `directory`.

    directory: made if it is not there; holds no other checkpoint. parent: an earlier checkpoint of
    the job, whose memory is not stored again. whole: it is built on no earlier one, whatever a
    configuration or policy says. leave_running, leave_stopped: the tree runs on, or is left
    stopped; else it ends. externalize: False: GPU memory goes into CRIU's own images. cpu_memory:
    who stores the processes' own memory: "criu", "ours" (this plugin) or "auto". layout: "packed":
    CRIU's images in one file; "criu": as CRIU writes them. tier: "disk" or "ram". recipients:
    certificates (PEM) that it is sealed for while it is made. key: a private key (PEM) that opens
    the parent, where that is sealed. max_chain: a chain of so many on top of a full checkpoint gets
    no longer. ghost_limit: size of the largest file without a name that is dumped with its content.
    skip_in_flight: leave out connections not accepted yet. link_remap: give files without a name
    one for the dump. Whatever is None is as the plugin's configuration says.

    Raises CriuError if CRIU or the plugin failed: the tree runs on then. CheckpointError for a
    directory or a parent that cannot be used.
    """
    if leave_running and leave_stopped:
        raise CheckpointError("a tree cannot be left both running and stopped")
    if whole and parent is not None:
        raise CheckpointError("a checkpoint with a parent is not whole")
    images = Path(directory)
    criu = find(options.get("criu"))
    plugin: dict[str, Setting | None] = {
        "externalize": externalize,
        "cpu_memory": cpu_memory,
        "layout": layout,
        "tier": tier,
        "recipients": tuple(str(Path(one).absolute()) for one in recipients) or None,
        "private_key": None if key is None else str(Path(key).absolute()),
        "compress": compress,
        "max_chain": max_chain,
        "parent": None if parent is None else _parent(Path(parent), images),
        "incremental": False if whole else None,
    }
    words: dict[str, bool | int | None] = {
        "ghost-limit": ghost_limit,
        "skip-in-flight": skip_in_flight,
        "link-remap": link_remap,
    }
    prepare_directory(images)
    done = run.dump(
        criu,
        pid,
        images,
        _settings(options, plugin, words),
        leave_running=leave_running,
        leave_stopped=leave_stopped,
    )
    return Checkpoint(images, dump=done)


def restore(directory: StrPath, **options: Unpack[RestoreOptions]) -> Run:
    """Restore the process tree in the image directory `directory`; see Checkpoint.restore."""
    return Checkpoint(directory).restore(**options)


def open(path: StrPath, parents: Sequence[StrPath] = ()) -> Checkpoint:
    """The checkpoint at `path`, an image directory or an archive of a container engine.

    parents: of an archive, directories and archives with earlier checkpoints that it is built on.
    Raises ImageError if there is nothing at `path`.
    """
    if not Path(path).exists():
        raise ImageError(f"{path} does not exist")
    return Checkpoint(path, parents)


def recover(
    pid: int,
    directory: StrPath | None = None,
    *,
    key: KeySource | None = None,
    threads: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> Recovery:
    """Bring back process `pid`, whose dump into `directory` was broken off by CRIU's death.

    directory: None: found by itself if that dump has taken memory out of the process. key: what
    opens a dump that is sealed (gpustasis.sealing.keys). threads: that put GPU memory back; 0: one
    for each processor. on_progress: told the bytes that are back. Raises ImageError if the images
    are damaged or another process's, DriverError if the driver refuses, CheckpointError if the
    process cannot be recovered, SealError for a wrong key or none.
    """
    images = find_images(pid) if directory is None else Path(directory)
    opened = None
    if key is not None and images is not None:
        if is_sealed(images):
            opened = open_key(images, key)
        else:
            log.warning("the dump into %s is not sealed: the key was not used", images)
    if directory is not None and (unharmed := find_unharmed(pid, Path(directory), opened)):
        return unharmed
    driver = Driver(driver_libraries(os.environ)[0])
    return recover_task(pid, images, driver, key=opened, threads=threads, on_progress=on_progress)


def prune(
    store: StrPath,
    *,
    keep_last: int | None = None,
    keep_within: timedelta | None = None,
    keep_hourly: int | None = None,
    keep_daily: int | None = None,
    dry_run: bool = False,
    key: KeySource | None = None,
) -> Pruned:
    """Remove the checkpoints in the directory `store` that no rule keeps and none that stays is
    built on. At least one rule is needed. dry_run: only say what would be removed. key: what opens
    those that are sealed (gpustasis.sealing.keys); without it their links say what they are built
    on.

    Raises CheckpointError if another prune is at work, it cannot be told what one is built on, or
    something cannot be removed.
    """
    rules = Rules(last=keep_last, within=keep_within, hourly=keep_hourly, daily=keep_daily)
    opener = None if key is None else manifest_opener(key)
    return prune_store(Path(store), rules, dry_run=dry_run, open_sealed=opener)


def _settings(
    options: CriuOptions,
    plugin: Mapping[str, Setting | None],
    words: Mapping[str, bool | int | None],
) -> run.Settings:
    """What one call gave, for run: keys of the plugin, options of CRIU and the rest.

    Raises TypeError for an option that there is not.
    """
    unknown = options.keys() - CriuOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    keys = {**plugin, "threads": options.get("threads")}
    criu = {
        "tcp-established": options.get("tcp_established", False),
        "tcp-close": options.get("tcp_close", False),
        "file-locks": options.get("file_locks", False),
        **words,
    }
    return run.Settings(
        plugin={key: value for key, value in keys.items() if value is not None},
        work=options.get("work_dir"),
        shell_job=options.get("shell_job"),
        options={key: value for key, value in criu.items() if value is not None},
        extra=options.get("criu_args", ()),
        on_line=options.get("on_line"),
    )


def _parent(parent: Path, images: Path) -> str:
    """The parent's directory without links, as the plugin is to be told."""
    directory = parent.resolve()
    if not is_sealed(directory) and find_manifest(directory) is None:
        raise CheckpointError(f"{parent} is no parent: it holds nothing that gpustasis saved")
    if directory == images.resolve():
        raise CheckpointError(f"{parent} cannot be its own parent; name another directory")
    return str(directory)
