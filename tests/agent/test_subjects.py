# SPDX-License-Identifier: Apache-2.0
"""Which process is meant: by a pidfile, and how large a tree may be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpustasis.agent.subjects import from_pidfile
from gpustasis.errors import AgentError

USER = 65534


@pytest.fixture
def pidfile(tmp_path: Path) -> Path:
    found = tmp_path / "above" / "job.pid"
    found.parent.mkdir(mode=0o755)
    found.write_text(f"{os.getpid()}\n")
    found.chmod(0o644)
    return found


def refused(path: Path) -> str:
    with pytest.raises(AgentError) as raised:
        from_pidfile(path).close()
    return str(raised.value)


def test_a_pidfile_of_root_s(pidfile: Path) -> None:
    process = from_pidfile(pidfile)
    assert process.pid == os.getpid()
    process.close()


def test_a_pidfile_that_others_can_write_to_is_refused(pidfile: Path) -> None:
    pidfile.chmod(0o664)
    assert "0664 others than its owner can write to it" in refused(pidfile)


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o777, 0o1777])
def test_root_s_pidfile_where_others_can_put_another_is_refused(pidfile: Path, mode: int) -> None:
    """A file of root's that holds a number is easy to find, and to move into such a directory."""
    pidfile.parent.chmod(mode)
    if mode == 0o755:
        os.chown(pidfile.parent, USER, USER)
    assert "others than root could replace it" in refused(pidfile)


def test_a_link_for_a_pidfile_is_refused(pidfile: Path) -> None:
    link = pidfile.with_name("link")
    link.symlink_to(pidfile)
    assert "it is no ordinary file" in refused(link)


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """To open a device may do something."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert "it is no ordinary file" in refused(fifo)
    finally:
        os.close(reader)
