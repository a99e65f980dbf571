# SPDX-License-Identifier: Apache-2.0
"""Texts of the store, changed at random."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from hypothesis import strategies as st

from gpustasis.errors import JobError
from gpustasis.jobs.store import Entry


def read_or_refused(read: Callable[[str, Entry], object], whole: str, data: st.DataObject) -> None:
    """With up to three characters taken out of `whole`, and up to three put in."""
    at = data.draw(st.integers(0, len(whole)))
    text = whole[:at] + data.draw(st.text(max_size=3)) + whole[at + data.draw(st.integers(0, 3)) :]
    with contextlib.suppress(JobError):
        read("k", Entry(text, 1))
