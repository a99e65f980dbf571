# SPDX-License-Identifier: Apache-2.0
"""CRIU's log: what went wrong, and where it is."""

from __future__ import annotations

import os
import re
from pathlib import Path

ERRORS_SHOWN = 3
_LIMIT = 8 << 20  # bytes of a log that are read, counted from its end
_LINE = re.compile(r"^\(\d+\.\d+\)\s*(?:\d+: )?")
# Of the plugin, and of the action script for ranks.
_PLUGIN_ERROR = re.compile(r"^Error\b.*?(?:\bcuda_plugin|\(rank-script\): gpustasis): (.*)$")
_CRIU_ERROR = re.compile(r"^Error \([^)]*\): (.*)$")

# Logged as an error, and then ignored by CRIU: without CAP_SYS_RESOURCE it cannot raise its own
# limit of open files to fs.nr_open. `gpustasis doctor` tells how to end it.
_HARMLESS = "Can't setup RLIMIT_NOFILE for self"

# What a line says about how far criu is. The last that matched is where it is.
_PHASES = (
    ("cuda_plugin: ", ""),  # our own words stand for themselves
    ("seccomp: Collected", "collecting the process tree"),
    ("Dumping task", "dumping processes"),
    ("Dumping pages", "dumping CPU memory"),
    ("Dumping finished successfully", "finishing"),
    ("Reading image tree", "reading images"),
    ("Forking task", "creating processes"),
    ("Restoring fd", "restoring files"),
    ("Restore finished successfully", "finishing"),
)


# What an error of CRIU's means, where its words do not say what to do.
_MEANINGS = (
    (
        re.compile(r"Can't fork for (\d+): File exists"),
        (
            "process {0}, or a group or session of that number, still exists here: end it; a "
            "process that has ended keeps its pid until its parent has waited for it"
        ),
    ),
    (
        re.compile(r"has bad size \d+ \(expect (\d+)\)"),
        (
            "the job had that file open, and it was written to since the checkpoint: bring back "
            "its {0} bytes (docs/operating.md, `Files that the job has open`)"
        ),
    ),
    (
        re.compile(r"has bad build-ID"),
        (
            "another version of that program or library is installed here than where the "
            "checkpoint was made: install the same one (docs/operating.md, `What a restore needs`)"
        ),
    ),
)


class LogTail:
    """Lines of a growing file, each given once it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def poll(self) -> list[str]:
        """The complete lines added since the last call; none while there is no file."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                fresh = file.read()
        except FileNotFoundError:
            return []
        complete = fresh[: fresh.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.decode("utf-8", "replace").splitlines()


def strip_time(line: str) -> str:
    """The line without its time stamp and pid."""
    return _LINE.sub("", line)


def plugin_errors(text: str) -> list[str]:
    """What our plugin says failed, in order."""
    matches = (_PLUGIN_ERROR.match(strip_time(line)) for line in text.splitlines())
    return [match[1].strip() for match in matches if match]


def criu_errors(text: str) -> list[str]:
    """CRIU's first errors, at most ERRORS_SHOWN; the later ones follow from these."""
    matches = (_CRIU_ERROR.match(strip_time(line)) for line in text.splitlines())
    found = [match[1].strip() for match in matches if match]
    ours = ("cuda_plugin: ", "gpustasis: ")
    telling = [
        line for line in found if not any(one in line for one in ours) and _HARMLESS not in line
    ]
    return telling[:ERRORS_SHOWN]


def errors_in(path: Path) -> list[str]:
    """What the log at `path` says went wrong: our plugin's reasons, or else CRIU's. Nothing if the
    log cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LIMIT))
            text = file.read(_LIMIT).decode("utf-8", "replace")
    except OSError:
        return []
    return plugin_errors(text) or criu_errors(text)


def meanings(errors: list[str]) -> list[str]:
    """What to do about those of CRIU's errors whose words do not say it."""
    found = [
        text.format(*match.groups())
        for pattern, text in _MEANINGS
        for line in errors
        if (match := pattern.search(line))
    ]
    return list(dict.fromkeys(found))


def explained(errors: list[str]) -> list[str]:
    """CRIU's errors for people, a line each, and what to do about them."""
    lines = [f"  criu: {line}" for line in errors]
    return lines + [f"  that is: {line}" for line in meanings(errors)]


def phase_of(line: str) -> str | None:
    """What criu is doing when it says `line`; None if the line does not tell."""
    for mark, phase in _PHASES:
        if mark in line:
            return phase or line.split(mark, 1)[1].strip()
    return None
