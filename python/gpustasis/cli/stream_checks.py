# SPDX-License-Identifier: Apache-2.0
"""What is refused of a stream before anything is frozen, or before a job ends for it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpustasis.cli.key_options import keep_from_dumps
from gpustasis.criu.images import PSTREE_NAME, TERMINALS_NAME, parse_pstree
from gpustasis.criu.own_options import own_option
from gpustasis.criu.plugin import driver_libraries, run_settings
from gpustasis.errors import CheckpointError, StreamError, UnsupportedError
from gpustasis.image.checkpoint import CheckpointFiles, has_gpu_state
from gpustasis.sealing.keys import KeySource, Remembered, configured_key
from gpustasis.sealing.signing import configured_trusted, verify_signed

# Of criu: the job would run on, or the images would not hold all of it.
_NOT_STREAMED = (
    *("--leave-running", "--page-server", "--lazy-pages", "--stream", "--prev-images-dir"),
    "--track-mem",
)


def require_streamable(extra: Sequence[str]) -> None:
    """Raise CheckpointError for an argument of criu that would leave the job running, or have its
    memory elsewhere than in the images that are sent."""
    word = own_option(extra, _NOT_STREAMED, "R")
    if word is not None:
        raise CheckpointError(
            f"criu's option {word} cannot follow --: the dump is sent as a stream"
        )


def require_on_disk(options: dict[str, Any]) -> None:
    """Raise UnsupportedError for a dump into memory: what is sent is what is in the directory."""
    tier = options.get("tier") or run_settings(os.environ).get("tier")
    if tier == "ram":
        raise UnsupportedError(
            'tier = "ram": not for a stream, which is sent out of the image directory: use '
            "--tier disk"
        )


def seals(recipients: Sequence[Path]) -> bool:
    """Whether a dump for these, or else for whom gpustasis's configuration names, is sealed."""
    return bool(recipients or run_settings(os.environ).get("recipients"))


def opening_key(key: KeySource | None) -> KeySource | None:
    """What opens a stream: the key that was named, else that of gpustasis's configuration. It is
    asked once. This process is kept from dumps then."""
    if key is None and (key := configured_key(os.environ)) is not None:
        keep_from_dumps()
    return None if key is None else Remembered(key)


def require_usable(options: dict[str, Any]) -> None:
    """Raise CheckpointError for what no restore could be done with."""
    word = own_option(options["criu_args"])
    if word is not None:
        raise CheckpointError(f"criu's option {word} is set by gpustasis itself")
    for pair in options["gpu_map"]:
        if not re.fullmatch(r"[^=]+=[^=]+", pair):
            raise CheckpointError(f"--gpu-map {pair}: name it OLD=NEW")
    pidfile = options["pidfile"]
    if pidfile is not None and pidfile.exists():
        raise CheckpointError(f"{pidfile} exists already; criu would fail to write the pid there")


def require_signed(directory: Path) -> None:
    """Raise SealError unless one whom gpustasis's configuration names as trusted has signed what
    was received; nobody need have where it names none."""
    trusted = configured_trusted(os.environ)
    if trusted:
        verify_signed(directory, trusted)


def require_restorable(options: dict[str, Any], has_terminal: bool, files: CheckpointFiles) -> None:
    """Raise StreamError if what was received cannot be restored here, as far as that is known."""
    if not has_terminal and _has_open_terminal(files):
        raise StreamError(
            "the job has a terminal, and there is none here to give it: restore it from a "
            "directory or a file, at a terminal"
        )
    manifest = files.manifest()
    if options["leave_stopped"] and manifest is not None and has_gpu_state(manifest):
        raise StreamError("the job has GPU state, which cannot be restored with --leave-stopped")
    if manifest is None or options["ignore_requirements"]:
        return
    from gpustasis.diagnosis import Status, restorability  # much, and few streams need it

    libraries = driver_libraries(os.environ)
    found = restorability.check_files(files, os.environ, options["criu"], *libraries)
    problems = [f"{x.name}: {x.text} ({x.remedy})" for x in found if x.status is Status.PROBLEM]
    if problems:
        raise StreamError("it cannot be restored here: " + "; ".join(problems))


def _has_open_terminal(files: CheckpointFiles) -> bool:
    """Whether the tree has a terminal open and belongs to another's session: then a restore gives
    it the terminal that criu has. Raises ImageError."""
    raw = None if files.read(TERMINALS_NAME) is None else files.read(PSTREE_NAME)
    if raw is None:
        return False
    root = parse_pstree(raw, files.place(PSTREE_NAME))[0]
    return root.sid != root.pid
