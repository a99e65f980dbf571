# SPDX-License-Identifier: Apache-2.0
"""Whose a rank is, in stores that answer late, and what of the store nobody can act on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gpustasis.jobs.lives import Way
from gpustasis.jobs.store import Answer, Put, Require, Unreachable
from jobs.test_lives import HERE, Keepers, keepers  # noqa: F401 - a fixture

ELSEWHERE = replace(HERE, run="/run/b", host="b")


def test_a_seat_whose_write_was_lost_is_taken_again(
    keepers: Keepers,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its keeper would keep a lease that nothing goes with, and be missed for ever."""
    one = keepers.start(1)
    key, write = keepers.keys.keeper(1), one._store.write
    lost: list[str] = []

    def once_lost(requires: Sequence[Require], puts: Sequence[Put]) -> Answer:
        if puts and puts[0].key == key and not lost:
            lost.append(key)
            raise Unreachable("no answer")
        return write(requires, puts)

    monkeypatch.setattr(one._store, "write", once_lost)
    keepers.store.revoke(one._lease)
    keepers.wait(lambda: bool(lost))
    keepers.wait(lambda: key in keepers.store.read(key).entries)
    assert one.unseated == ""
