# SPDX-License-Identifier: Apache-2.0
"""The file that notes how far the check of a store has come, from which a killed one goes on."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpustasis._core import image_name
from gpustasis.cli import cli
from gpustasis.errors import CheckpointError, ImageError
from gpustasis.files import replace_file
from gpustasis.image import found_damage
from gpustasis.image.found_damage import Damage, Progress
from gpustasis.image.store_verification import verify_store
from support.chains import make_chain
from support.image_samples import PAGE


def flip(place: Path) -> None:
    """One bit of the first chunk of the image of pid 7 in `place`."""
    path = place / image_name(7)
    raw = bytearray(path.read_bytes())
    raw[2048] ^= 0x10
    path.write_bytes(raw)


def test_a_check_that_was_killed_goes_on(tmp_path: Path) -> None:
    store, state = tmp_path / "store", tmp_path / "state.json"
    store.mkdir()
    chain = make_chain(store, 3, pages=32)
    flip(chain[0])
    whole = verify_store(store)

    class KilledError(Exception):
        pass

    seen = 0

    def kill(name: str, done: int, total: int) -> None:
        nonlocal seen
        seen += 1
        if seen % 4 == 0:
            raise KilledError(name, done, total)

    read, runs = 0, 0
    while True:
        try:
            found = verify_store(store, state=state, rate=4 * 4 * PAGE * 1000, on_slice=kill)
            break
        except KilledError:
            runs += 1
            assert state.exists()
            read += sum(len(text) for text in json.loads(state.read_bytes())["checked"])
    assert runs >= 1
    assert found.continued
    assert not state.exists()
    assert found.verdicts == whole.verdicts
    assert found.read_bytes < whole.read_bytes


def test_the_state_of_another_store_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        make_chain(tmp_path / name, 0)
    state = tmp_path / "state"

    def stop(name: str, done: int, total: int) -> None:
        raise KeyError(name)

    with pytest.raises(KeyError):
        verify_store(tmp_path / "one", state=state, on_slice=stop)
    state.write_text(json.dumps({**_state(), "store": str(tmp_path / "one")}))
    with pytest.raises(CheckpointError, match="name another file"):
        verify_store(tmp_path / "two", state=state)
    for raw in (b"", b"[]", b'{"version": 2}', b"\xff"):
        state.write_bytes(raw)
        with pytest.raises(CheckpointError, match="remove it"):
            verify_store(tmp_path / "one", state=state)


def test_the_state_of_a_damaged_store_stays_small(tmp_path: Path) -> None:
    path, damage = tmp_path / "state", Damage()
    damage.add([(chunk, f"chunk {chunk} is damaged") for chunk in range(300_000)])
    Progress(tmp_path, path).note("key", 300_000, damage)
    assert path.stat().st_size < 4096
    again = Progress(tmp_path, path)
    assert again.continued
    assert again.current == ("key", 300_000, damage)
    assert again.current[2].numbers() == list(range(300_000))


def test_the_state_is_not_written_at_each_slice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write is of all that was found so far."""
    write, writes = replace_file, 0

    def counting(*arguments: Any, **options: Any) -> None:
        nonlocal writes
        writes += 1
        write(*arguments, **options)

    monkeypatch.setattr(found_damage, "replace_file", counting)
    damage, slices = Damage(), 2000
    progress = Progress(tmp_path, tmp_path / "state")
    for number in range(slices):
        damage.add([(number * 20 + 2 * apart, "damaged") for apart in range(10)])
        progress.note("key", number * 20 + 20, damage)
    assert 1 <= writes < slices // 2


def test_damage_that_lies_apart_is_kept_exactly(tmp_path: Path) -> None:
    numbers = [0, 1, 2, 5, 7, 8, 90]
    damage = Damage()
    for number in numbers:
        damage.add([(number, f"chunk {number}")])
    Progress(tmp_path, tmp_path / "state").finish("key", damage)
    found = Progress(tmp_path, tmp_path / "state").checked["key"]
    assert (found.numbers(), found.count()) == (numbers, len(numbers))
    assert found == damage


def _state() -> dict[str, object]:
    return {"version": 2, "checked": {}, "current": ["", 0, [[], []]]}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    place = tmp_path / "store"
    place.mkdir()
    make_chain(place, 1)
    return place


def test_the_state_of_an_older_version_means_nothing(tmp_path: Path, store: Path) -> None:
    """Nobody has to remove it, after an upgrade, before the timer works again."""
    state = tmp_path / "state"
    state.write_text(json.dumps({"version": 1, "store": str(store), "other": []}))
    found = verify_store(store, state=state)
    assert (found.continued, len(found.verdicts)) == (False, 2)
    assert not state.exists()
    state.write_text(json.dumps({**_state(), "version": 3, "store": str(store)}))
    with pytest.raises(CheckpointError, match="version 3"):
        verify_store(store, state=state)


def test_a_link_in_the_place_of_the_state_is_refused(tmp_path: Path, store: Path) -> None:
    """Also one that leads nowhere yet."""
    state = tmp_path / "state"
    state.symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="remove it"):
        verify_store(store, state=state)
    assert state.is_symlink()


def test_what_was_found_is_told_before_the_state_that_stays(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", refuse)
    words = ["verify", str(store), "--state", str(tmp_path / "state")]
    whole = CliRunner().invoke(cli, words)
    assert "2 checkpoints whole" in whole.output
    assert type(whole.exception) is CheckpointError
    assert f"cannot remove {tmp_path / 'state'}: Read-only file system" in str(whole.exception)
    flip(store / "c000")
    damaged = CliRunner().invoke(cli, words)
    assert "is damaged" in damaged.output
    assert isinstance(damaged.exception, ImageError)
    assert "are damaged: c000, c001; cannot remove" in str(damaged.exception)


def test_the_state_is_on_the_disk_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    Progress(tmp_path, tmp_path / "state").note("key", 1, Damage())
    assert len(synced) == 2  # the file, and its name
