# SPDX-License-Identifier: Apache-2.0
"""One dump of a rank that cannot be drained, or a neighbour that is slow, keeps no other dump in
memory, and no keeper from its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpustasis._core import ARENA_MARKER, MANIFEST_NAME
from gpustasis.draining.drain import Drained, drain
from gpustasis.errors import JobError
from gpustasis.jobs import neighbour
from gpustasis.jobs.aftercare import Aftercare, tended
from gpustasis.jobs.place import Place, place_of
from support.job_ranks import wait_for
from support.local_checkpoints import make_local

KEY = f"{'a' * 32}-{'b' * 16}"
NOWHERE = "127.0.0.1:1"
FOR_EVER_S = 120.0  # as long as any test waits for a neighbour that never ends


@pytest.fixture
def place(tmp_path: Path) -> Place:
    found = place_of("job", 0, tmp_path / "kept", tmp_path / "run")
    found.make()
    return found


def aftercare_of(place: Place) -> Aftercare:
    return Aftercare(place, is_open=lambda _: False, drained=lambda *_: None)


def is_durable(images: Path) -> bool:
    return (images / MANIFEST_NAME).exists() and not (images / ARENA_MARKER).exists()


def test_a_marker_without_content_keeps_no_later_dump_in_memory(
    place: Place, arena: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The host has lost its power."""
    warned: list[str] = []
    for number in (1, 2):
        make_local(place.images(number), arena)
    (place.images(1) / ARENA_MARKER).write_bytes(b"")
    with tended(aftercare_of(place), warned.append):
        pass
    assert [is_durable(place.images(number)) for number in (1, 2)] == [False, True]
    assert f"{place.images(1)}: is not drained: the checkpoint in " in caplog.text
    assert warned == []  # it is lost, and was not in memory


def test_what_fails_as_nothing_should_is_told_and_keeps_no_later_dump_in_memory(
    place: Place, arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_once(images: Path, **options: Any) -> Drained:
        if images == place.images(1):
            raise RuntimeError("a mistake")
        return drain(images, **options)

    monkeypatch.setattr("gpustasis.jobs.aftercare.drain", fail_once)
    warned: list[str] = []
    for number in (1, 2):
        make_local(place.images(number), arena)
    with tended(aftercare_of(place), warned.append):
        pass
    assert [is_durable(place.images(number)) for number in (1, 2)] == [False, True]
    (said,) = warned
    assert said.startswith(f"{place.images(1)} is in memory only")
    assert "a bug in gpustasis: RuntimeError('a mistake')" in said


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a copy to a neighbour has begun that never ends."""
    begun = threading.Event()

    def copy_durable(images: Path, goes_on: Callable[[], bool]) -> None:
        begun.set()
        end = time.monotonic() + FOR_EVER_S
        while goes_on():
            assert time.monotonic() < end, "nobody ends the copy"
            time.sleep(0.01)

    # Where nothing is reached, what was sent is told again later.
    monkeypatch.setattr("gpustasis.jobs.aftercare._AGAIN_S", 100.0)
    monkeypatch.setattr(neighbour, "drop_older", lambda *_: None)
    monkeypatch.setattr(neighbour, "copy_durable", copy_durable)
    return begun


def test_later_dumps_are_drained_before_one_is_copied(
    place: Place, arena: Path, slow: threading.Event
) -> None:
    aftercare = aftercare_of(place)
    for number in (1, 2):
        make_local(place.images(number), arena)
    aftercare.committed(place.images(1), NOWHERE, KEY, is_base=True)
    aftercare.wake()
    assert slow.wait(FOR_EVER_S / 2)
    assert [is_durable(place.images(number)) for number in (1, 2)] == [True, True]
    aftercare.close()


def test_a_keeper_that_ends_waits_for_no_copy(
    place: Place, arena: Path, slow: threading.Event
) -> None:
    aftercare = aftercare_of(place)
    make_local(place.images(1), arena)
    begin = time.monotonic()
    aftercare.committed(place.images(1), NOWHERE, KEY, is_base=True)  # or it may be drained before
    with tended(aftercare, pytest.fail):
        wait_for(slow.is_set, "the copy")
        make_local(place.images(2), arena)
    assert time.monotonic() - begin < FOR_EVER_S / 2
    assert [is_durable(place.images(number)) for number in (1, 2)] == [True, True]


def test_nor_does_it_begin_one(place: Place, arena: Path, slow: threading.Event) -> None:
    aftercare = aftercare_of(place)
    with tended(aftercare, pytest.fail):
        make_local(place.images(1), arena)
        with aftercare.no_copy(lambda: True):
            aftercare.committed(place.images(1), NOWHERE, KEY, is_base=True)
            aftercare.wake()
            wait_for(lambda: is_durable(place.images(1)), "the drain")
            waiting = threading.Thread(target=aftercare.wait)
            waiting.start()
            wait_for(lambda: aftercare._waits > 0, "who waits")
        waiting.join()
    assert not slow.is_set()


def test_a_keeper_that_ends_with_an_error_names_what_is_in_memory_only(
    place: Place, arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def fail_at_the_second(images: Path, **options: Any) -> Drained:
        if images == place.images(1):
            return drain(images, **options)
        begun.set()
        raise RuntimeError("a mistake")

    monkeypatch.setattr("gpustasis.jobs.aftercare.drain", fail_at_the_second)
    warned: list[str] = []
    for number in (1, 2, 3):
        make_local(place.images(number), arena)
    (place.images(3) / ARENA_MARKER).write_bytes(b"")  # it is lost, and in no memory
    with (
        pytest.raises(JobError, match="the epoch was committed"),
        tended(aftercare_of(place), warned.append),
    ):
        assert begun.wait(FOR_EVER_S)
        raise JobError("the epoch was committed without this rank's dump")
    (said,) = warned
    assert said.startswith(f"{place.images(2)} is in memory only, here and at the neighbour: ")
    assert "the rank's next one on this host drains it" in said
