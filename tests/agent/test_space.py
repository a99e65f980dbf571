# SPDX-License-Identifier: Apache-2.0
"""Where the agent keeps and opens what is its own."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpustasis.agent import daemon, space
from gpustasis.agent.config import Config
from gpustasis.agent.server import listen
from gpustasis.agent.space import estimate
from gpustasis.errors import AgentError

USER = 12345


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="agent-") as name:
        yield Path(name)


@pytest.mark.parametrize("key", ["store", "socket", "http_socket", "jobs_socket"])
def test_what_others_could_replace_is_refused(place: Path, key: str) -> None:
    """The directory above a store can be another one's, with a store of his in it."""
    users = place / "users"
    users.mkdir(mode=0o755)
    os.chown(users, USER, USER)
    there = place / "link"
    there.symlink_to(users)
    config = Config(
        store=place / "store", socket=place / "s", http_socket=place / "h", jobs_socket=place / "j"
    )
    with pytest.raises(AgentError, match=f"is refused: others could replace it: .* user {USER}"):
        daemon.run(replace(config, **{key: there / "more" / "x"}))
    assert not list(users.iterdir())


@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_a_socket_has_its_mode_from_the_first_moment(
    place: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mode that is given later goes to whatever a link leads to by then."""
    monkeypatch.setattr("os.chmod", None)
    monkeypatch.setattr("pathlib.Path.chmod", None)
    with listen(place / "s", mode):
        assert stat.S_IMODE((place / "s").stat().st_mode) == mode


def test_what_is_in_memory_first_needs_room_there() -> None:
    gpu = 7 << 20
    none, gpus, everything = (
        estimate(os.getpid(), gpu, "").memory,
        estimate(os.getpid(), gpu, "gpu").memory,
        estimate(os.getpid(), gpu, "all").memory,
    )
    assert gpus - none == gpu
    assert everything - gpus > 1 << 20  # of this process


def test_the_pool_of_the_arena_is_memory_that_is_there_for_one_dump(
    place: Path, arena: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are what the last checkpoint was made of, and the next one writes into them."""
    config = replace(Config(), store=place, memory_reserve=0)
    arena.mkdir(mode=0o700, parents=True)
    (arena / "pool").mkdir()
    (arena / "pool" / "one").write_bytes(bytes(8 << 20))
    (place / "settings.toml").write_text(f'arena = "{arena}"\n')
    monkeypatch.setenv("GPUSTASIS_CONFIG", str(place / "settings.toml"))
    monkeypatch.setattr(space, "available_memory", lambda: 100 << 20)
    in_arena = space.Need(memory=108 << 20, disk=0, arena=50 << 20)
    nothing = space.Need(0, 0)
    assert space.why_not(in_arena, nothing, config) == ""
    assert "it needs up to 108.0 MiB" in space.why_not(replace(in_arena, arena=0), nothing, config)
    assert "100.0 MiB are there" in space.why_not(
        in_arena, space.Need(memory=0, disk=0, arena=1), config
    )
    assert space.why_not(replace(in_arena, arena=7 << 20), nothing, config) != ""
    assert space.why_not(replace(in_arena, memory=(108 << 20) + 1), nothing, config) != ""
    (arena / "pool" / "one").unlink()
    assert space.why_not(in_arena, nothing, config) != ""
