# SPDX-License-Identifier: Apache-2.0
"""gpustasis.text: what others wrote is shown and does nothing to a terminal."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustasis.text import safe, safe_lines

ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=()))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain words, Grüße, 日本", "plain words, Grüße, 日本"),
        ("C:\\temp", "C:\\temp"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("two\nlines\r\tand a tab", "two\\nlines\\r\\tand a tab"),
        ("\x9b31m", "\\x9b31m"),  # CSI in one byte
        ("\u202egnp.exe\u2066", "\\u202egnp.exe\\u2066"),
        ("no\u200bwidth\ufeff", "no\\u200bwidth\\ufeff"),
        ("line\u2028end", "line\\u2028end"),
        ("\U000e0041tag", "\\U000e0041tag"),
        ("lone \ud800 surrogate", "lone \\ud800 surrogate"),
        (os.fsdecode(b"name-\xff\xfe"), "name-\\xff\\xfe"),
        ("nul\0", "nul\\x00"),
    ],
)
def test_what_is_not_printable_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert safe(text) == shown


@given(ANY_TEXT)
def test_safe_text_is_printable_stays_so_and_can_be_written(text: str) -> None:
    shown = safe(text)
    assert shown.isprintable()
    assert safe(shown) == shown
    shown.encode()


@given(ANY_TEXT)
def test_lines_of_others_cannot_pass_for_lines_of_ours(text: str) -> None:
    first, *others = safe_lines(f"gpustasis: {text}").split("\n")
    assert first.startswith("gpustasis: ")
    assert all(line.startswith("  ") for line in others)
    assert all(line.isprintable() for line in (first, *others))


def test_lines_keep_the_indentation_that_they_have() -> None:
    assert safe_lines("failed\n  criu: no\n    more\nand") == "failed\n  criu: no\n    more\n  and"
