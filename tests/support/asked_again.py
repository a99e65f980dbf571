# SPDX-License-Identifier: Apache-2.0
"""A command is asked again that was refused for a named cause, which passes by itself. Any other
failure is the caller's to judge, at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from subprocess import CompletedProcess

# With cgroup v1 runc gives up if some task gets no processor for a quarter of a second: it thaws
# the container by itself, and nothing was dumped.
UNFROZEN = "unable to freeze"
_TIMEOUT_S = 60.0
_PAUSE_S = 0.1


def ask_again(ask: Callable[[], CompletedProcess[str]], *causes: str) -> CompletedProcess[str]:
    """What ask() says once it does not fail with one of them in its stderr. After a minute:
    whatever it says."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        done = ask()
        passes = done.returncode != 0 and any(cause in done.stderr for cause in causes)
        if not passes or time.monotonic() > deadline:
            return done
        time.sleep(_PAUSE_S)


def done_once_frozen(ask: Callable[[], CompletedProcess[str]]) -> CompletedProcess[str]:
    """What ask() says, which has to succeed, and needs a container that stands still."""
    done = ask_again(ask, UNFROZEN)
    assert done.returncode == 0, done
    return done
