# SPDX-License-Identifier: Apache-2.0
"""Which of a user's arguments for criu this package sets itself."""

from __future__ import annotations

from collections.abc import Sequence

# Options of criu that this package sets itself: log and pidfile are read afterwards, the plugin's
# errors are found in the log. None of them may come among a user's further arguments.
_OWN_LONG = (
    *("--tree", "--images-dir", "--libdir", "--log-file", "--work-dir", "--pidfile"),
    "--leave-stopped",  # a restore of GPU memory cannot do it, and says so before it begins
)
_OWN_SHORT = "tDLoWs"
_SHORT_FLAGS = "dsScRjlVh"  # criu's own that take no value


def own_option(
    extra: Sequence[str], long: Sequence[str] = _OWN_LONG, short: str = _OWN_SHORT
) -> str | None:
    """The first of a user's arguments for criu that sets what this package sets, or what else is
    named; None: none does.

    criu takes a long option by any beginning of its name, and several short ones in one word.
    """
    for word in extra:
        name = word.partition("=")[0]
        if len(name) > 2 and any(own.startswith(name) for own in long):
            return word
        if word.startswith("-") and not word.startswith("--"):
            flags = word[1:].lstrip(_SHORT_FLAGS.translate({ord(letter): None for letter in short}))
            if flags[:1] and flags[0] in short:
                return word
    return None
