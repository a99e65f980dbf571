# SPDX-License-Identifier: Apache-2.0
"""Whatever was on the host: after install and uninstall it is there again, to the byte."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpustasis.install import layout, record
from install.conftest import install_into, put, uninstall_from
from install.tree import contents, copy, dies_at, tree

BLANKS = st.sampled_from(["", "\n", "\n\n", "   \n"])
LINES = st.sampled_from(
    [
        *("# a comment", "tcp-established", "ghost-limit 100M", "ghost-limit=7", "no-link-remap"),
        *(f"libdir {layout.PLUGIN_DIRECTORY}", "action-script /opt/a", 'lsm-profile "a b"', "\t"),
        *("# BEGINNING of gpustasis", "log-file x # why", "# größe"),
    ]
)
CONFIGURATION = st.builds(
    lambda lines, end: ("\n".join(lines) + end).encode(), st.lists(LINES, max_size=6), BLANKS
)
MODES = st.sampled_from([0o644, 0o600, 0o664, 0o400])
FILES = st.dictionaries(
    st.sampled_from(sorted(layout.BLOCK_PATHS)), st.tuples(CONFIGURATION, MODES), max_size=3
)
OTHERS = st.sets(
    st.sampled_from(
        [
            *("/etc/gpustasis/config.toml", "/etc/crio/crio.conf", "/usr/lib/gpustasis/x"),
            *("/usr/libexec/y", "/var/lib/gpustasis/containers/z", "/etc/criu/other.conf"),
        ]
    )
)


MEMORY = "/dev/shm"  # a tmpfs: there fsync costs nothing, and it is called ten thousand times


@pytest.fixture
def top() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        yield Path(directory)


def prepared(top: Path, files: dict[str, tuple[bytes, int]], others: set[str]) -> Path:
    root = top / "root"
    root.mkdir()
    for number, (path, (text, mode)) in enumerate(sorted(files.items())):
        place = put(root, path, text)
        place.chmod(mode)
        os.utime(place, ns=(10**18 + number, 10**18 + number))
    for path in others:
        put(root, path, "# somebody's\n")
    return root


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(files=FILES, others=OTHERS, again=st.booleans())
def test_uninstall_leaves_what_was_there(
    files: dict[str, tuple[bytes, int]], others: set[str], again: bool
) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as top:
        root = prepared(Path(top), files, others)
        before = tree(root)
        install_into(root)
        installed = tree(root)
        assert installed != before
        if again:
            install_into(root)
            assert tree(root) == installed
        uninstall_from(root)
        assert tree(root) == before


STARTS = {
    "an empty root": ({}, set[str]()),
    "a host in use": (
        {
            "/etc/criu/default.conf": (b"tcp-established\nghost-limit 1G", 0o640),
            "/etc/criu/crun.conf": (b"link-remap\n", 0o600),
        },
        {"/etc/gpustasis/config.toml", "/var/lib/gpustasis/containers/z"},
    ),
}


@pytest.mark.parametrize("start", STARTS)
def test_death_at_any_moment_of_install(start: str, top: Path) -> None:
    origin = prepared(top, *STARTS[start])
    before = tree(origin)
    whole = copy(origin, top / "whole")
    install_into(whole)
    turn = 0
    while True:
        turn += 1
        root = copy(origin, top / "killed")
        if not dies_at(turn, lambda root=root: install_into(root)):  # type: ignore[misc]
            break
        other = copy(root, top / "again")
        install_into(other)
        assert contents(other) == contents(whole), f"killed at {turn}, installed again"
        uninstall_from(other)
        assert tree(other) == before, f"killed at {turn}, installed again and uninstalled"
        if (root / record.RECORD.lstrip("/")).exists():
            uninstall_from(root)
        else:  # it died before it did anything but prepare its record
            with pytest.raises(AssertionError):
                uninstall_from(root)
        assert tree(root) == before, f"killed at {turn}, uninstalled"
        shutil.rmtree(root)
        shutil.rmtree(other)
    assert turn > 20


@pytest.mark.parametrize("start", STARTS)
def test_death_at_any_moment_of_uninstall(start: str, top: Path) -> None:
    origin = prepared(top, *STARTS[start])
    before = tree(origin)
    whole = copy(origin, top / "whole")
    install_into(whole)
    turn = 0
    while True:
        turn += 1
        root = copy(whole, top / "killed")
        if not dies_at(turn, lambda root=root: uninstall_from(root)):  # type: ignore[misc]
            break
        left = (root / record.RECORD.lstrip("/")).exists()
        if left:
            uninstall_from(root)
        else:
            with pytest.raises(AssertionError):
                uninstall_from(root)
        assert tree(root) == before, f"killed at {turn}"
        shutil.rmtree(root)
    assert turn > 10


def test_death_at_any_moment_of_an_upgrade(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newer version has another plugin, other lines, and one file less."""
    origin = prepared(top, *STARTS["a host in use"])
    before = tree(origin)
    old = copy(origin, top / "old")
    install_into(old)
    files, lines = layout.files, layout.lines
    monkeypatch.setattr(
        layout,
        "files",
        lambda python: tuple(
            layout.File(f.path, f.data + b"\n", f.mode, f.kind)
            for f in files(python)
            if f.path != layout.CRIO_DROP_IN
        ),
    )
    monkeypatch.setattr(
        layout,
        "lines",
        lambda: tuple(layout.Lines(x.path, x.body + "# new\n", x.if_there) for x in lines()),
    )
    whole = copy(old, top / "whole")
    done = install_into(whole, version="2.0")
    assert done[layout.CRIO_DROP_IN].action == "remove"
    assert done[layout.PLUGIN].action == "replace"
    turn = 0
    while True:
        turn += 1
        root = copy(old, top / "killed")
        if not dies_at(turn, lambda root=root: install_into(root, version="2.0")):  # type: ignore[misc]
            break
        other = copy(root, top / "again")
        install_into(other, version="2.0")
        assert contents(other) == contents(whole), f"killed at {turn}, installed again"
        uninstall_from(root)
        assert tree(root) == before, f"killed at {turn}, uninstalled"
        shutil.rmtree(root)
        shutil.rmtree(other)
    assert turn > 15
