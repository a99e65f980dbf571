"""Saying something through the runtime that has started the hook, when its stderr goes nowhere.

crun gives hooks /dev/null, and says only that one failed. It was itself given a log by the engine,
`--log FILE --log-format=json`, and a stderr. Podman shows what either of them says; CRI-O shows
stderr. So the sentence is written to both. Whatever of this cannot be done is left: the start is
refused all the same.
"""

from __future__ import annotations

import itertools
import json
import os

_MAX_COMMAND_BYTES = 1 << 16


def discarded() -> bool:
    """Whether stderr is /dev/null."""
    try:
        return os.fstat(2).st_rdev == os.stat(os.devnull).st_rdev
    except OSError:
        return True


def tell_runtime(sentence: str) -> None:
    """Write it to the log and to the stderr of the parent process, if they are there."""
    parent = os.getppid()
    log = _log_of(parent)
    if log is not None:
        entry = {"msg": sentence, "level": "error"}
        _append(log, json.dumps(entry) + "\n", os.O_NOFOLLOW)
    _append(f"/proc/{parent}/fd/2", sentence + "\n", 0)


def _log_of(pid: int) -> str | None:
    """The JSON log that a runtime was given on its command line."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = os.fsdecode(file.read(_MAX_COMMAND_BYTES)).split("\0")
    except OSError:
        return None
    if "--log-format=json" not in words:
        return None
    for word, following in itertools.pairwise(words):
        if word == "--log":
            return following
        if word.startswith("--log="):
            return word.removeprefix("--log=")
    return None


def _append(path: str, text: str, flags: int) -> None:
    """Without waiting for a reader, and without making a file."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    except OSError:
        return
    try:
        os.write(descriptor, text.encode())
    except OSError:
        pass
    finally:
        os.close(descriptor)
