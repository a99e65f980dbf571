# SPDX-License-Identifier: Apache-2.0
"""Logs of criu that a killed agent has left. criu writes its log into a private directory, from
its first moment on, and only when it has ended that is copied to the images (criu/run.py): where
both were killed, it is still there."""

from __future__ import annotations

import logging
import os
import re
import stat
import tempfile
from pathlib import Path

from gpustasis.files import open_regular

log = logging.getLogger(__name__)

_LOGS = "gpustasis-*/dump.log"  # below the directory for temporary files
_READ = 1 << 18  # bytes of a log: the line stands before anything that grows with the job
_CLOCK_S = 1.0  # a file system's clock may be that late


def dump_has_begun(pid: int, since: float) -> bool:
    """Whether there is a log of a criu that has begun to dump the tree below `pid`, and has written
    to it after `since` (seconds since 1970). criu says so before it loads the plugin."""
    begun = re.compile(rb"^\([0-9.]+\) Dumping processes \(pid: %d[ )]" % pid, re.MULTILINE)
    for path in Path(tempfile.gettempdir()).glob(_LOGS):
        try:
            if begun.search(_begin_of(path, since - _CLOCK_S)):
                return True
        except OSError as exc:
            log.warning("%s is not looked at: %s", path, exc)
    return False


def _begin_of(path: Path, since: float) -> bytes:
    """Of a log that was written to since then; others than this user may put what they like beside
    it. Raises OSError."""
    with open_regular(path, os.O_NOFOLLOW) as file:
        found = os.fstat(file.fileno())
        others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if found.st_uid != os.geteuid() or others or found.st_mtime < since:
            return b""
        return file.read(_READ)
