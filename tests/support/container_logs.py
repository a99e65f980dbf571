# SPDX-License-Identifier: Apache-2.0
"""Logs that somebody still writes to."""

from __future__ import annotations


def whole_lines(text: str) -> list[str]:
    """Without a last one whose end is not there yet: a write can become visible in two steps."""
    return text[: text.rfind("\n") + 1].splitlines()


def records(text: str) -> list[str]:
    """What a container has written, from the log that CRI has of it: TIME STREAM F TEXT. A runtime
    that was held up cuts a line into parts, all but the last with P in place of F. They are put
    together, with the time of the last; without that one they are left out."""
    found: list[str] = []
    begun: dict[str, str] = {}
    for line in whole_lines(text):
        if line.count(" ") < 3:
            continue
        moment, stream, tag, part = line.split(" ", 3)
        said = begun.pop(stream, "") + part
        if tag == "P":
            begun[stream] = said
        else:
            found.append(f"{moment} {stream} {tag} {said}")
    return found


def text_of(record: str) -> str:
    return record.split(" ", 3)[3]
