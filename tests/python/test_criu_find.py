# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpustasis.criu.find import Criu, choose, find, find_all, parse_version
from gpustasis.errors import CriuError
from gpustasis_bench.roots import roots_directory


def fake_criu(program: Path, says: str, status: int = 0) -> Path:
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n")
    program.chmod(0o755)
    return program


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """Finds nothing but what is put below tmp_path, and what the system itself has."""
    return {"PATH": str(tmp_path / "bin"), "GPUSTASIS_CACHE": str(tmp_path / "cache")} | more


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("Version: 4.2.1\n", (4, 2, 1)),
        ("Version: 4.3\nGitID: v4.3-12-gabcdef\n", (4, 3)),
        ("Warn  (x.c:1): text\nVersion: 3.17.1\n", (3, 17, 1)),
        ("criu: not found\n", ()),
        ("", ()),
    ],
)
def test_reads_the_version(text: str, version: tuple[int, ...]) -> None:
    assert parse_version(text) == version


def test_the_one_named_stands_alone(tmp_path: Path) -> None:
    fake_criu(tmp_path / "bin/criu", "Version: 4.4")
    mine = fake_criu(tmp_path / "mine", "Version: 4.1.1")
    other = fake_criu(tmp_path / "other", "Version: 4.2")
    env = environment(tmp_path, GPUSTASIS_CRIU=str(other))
    assert [(c.program, c.origin) for c in find_all(env)] == [(other, "GPUSTASIS_CRIU")]
    assert [(c.program, c.version) for c in find_all(env, str(mine))] == [(mine, (4, 1, 1))]


def test_a_directory_is_a_root_with_its_own_loader(tmp_path: Path) -> None:
    root = tmp_path / "root"
    loader = root / "lib64/ld-linux-x86-64.so.2"
    fake_criu(loader, "Version: 4.2.1")  # stands for the loader: it is what gets run
    (root / "usr/sbin").mkdir(parents=True)
    (root / "usr/sbin/criu").touch()
    env = environment(tmp_path, LD_LIBRARY_PATH="/emulator:/more")
    (criu,) = find_all(env, str(root))
    assert criu.version == (4, 2, 1)
    assert criu.command(env) == [
        str(loader),
        "--library-path",
        f"{root}/usr/lib/x86_64-linux-gnu:/emulator:/more",
        f"{root}/usr/sbin/criu",
    ]


def test_nothing_is_looked_for_or_run_in_caches(tmp_path: Path) -> None:
    """Whoever can write there would have it run as root."""
    fake_criu(tmp_path / "bin/criu", "Version: 4.1")
    ran = tmp_path / "ran"
    for suite in ("trixie", "sid", "experimental"):
        root = tmp_path / "cache/gpustasis/roots" / suite
        loader = fake_criu(root / "lib64/ld-linux-x86-64.so.2", "Version: 4.2.1")
        loader.write_text(f"#!/bin/sh\ntouch {ran}\necho Version: 4.2.1\n")
        fake_criu(root / "usr/sbin/criu", "")
    cache = tmp_path / "cache"
    for more in (
        {"GPUSTASIS_CACHE": str(cache / "gpustasis")},
        {"GPUSTASIS_CACHE": "", "XDG_CACHE_HOME": str(cache)},
    ):
        found = find_all(environment(tmp_path, **more))
        assert all(criu.root is None for criu in found)
        assert choose(found).origin == "PATH"
    assert not ran.exists()


def test_too_old_and_broken_ones_are_passed_over_and_named(tmp_path: Path) -> None:
    old = fake_criu(tmp_path / "old", "Version: 3.17.1")
    broken = fake_criu(tmp_path / "broken", "libnet.so.1: cannot open", status=127)
    candidates = find_all(environment(tmp_path), str(old)) + find_all(
        environment(tmp_path), str(broken)
    )
    with pytest.raises(CriuError) as caught:
        choose(candidates)
    message = str(caught.value)
    assert "version 3.17.1" in message
    assert "libnet.so.1: cannot open" in message
    assert "exit 127" in message


def test_one_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(CriuError, match=str(tmp_path / "no-criu")):
        find(str(tmp_path / "no-criu"), environment(tmp_path))


def test_none_at_all_says_what_to_do() -> None:
    with pytest.raises(CriuError, match=r"install criu >= 4\.1 or name one with --criu"):
        choose(())


def test_test_roots_follow_the_environment() -> None:
    assert roots_directory({"GPUSTASIS_CACHE": "/c", "XDG_CACHE_HOME": "/x"}) == Path("/c/roots")
    assert roots_directory({"XDG_CACHE_HOME": "/x"}) == Path("/x/gpustasis/roots")
    assert roots_directory({}) == Path("/var/cache/gpustasis/roots")


def test_every_version_found_here_runs_and_is_new_enough(criu: Criu) -> None:
    assert criu.usable
    assert criu.problem == ""
    assert os.access(criu.program, os.X_OK)
