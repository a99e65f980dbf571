# SPDX-License-Identifier: Apache-2.0
"""With which status a keeper ends that has taken over the tasks of another one."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpustasis.cli import cli
from gpustasis.criu import find
from gpustasis.errors import JobError
from gpustasis.jobs import stopping
from gpustasis.jobs.rank import Context
from gpustasis.jobs.stopping import is_unheard
from gpustasis.jobs.supervise import Supervisor
from jobs.test_undoing import NO_CRIU, SETTINGS, context, server  # noqa: F401 - fixtures
from support.job_ranks import wait_for

# They are no children of this process; nobody hears of their end.
PARENT = """
import subprocess, sys
script = 'while [ ! -e "$0" ]; do sleep 0.05; done; exit 3'
print(subprocess.Popen(["sh", "-c", script, sys.argv[1]], start_new_session=True).pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def left(context: Context, tmp_path: Path) -> Iterator[Path]:  # noqa: F811
    """The tasks of a keeper that has died. The file upon which they end."""
    end = tmp_path / "end"
    words, pipe = [sys.executable, "-c", PARENT, end], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout is not None
        context.note(pid=int(parent.stdout.readline()))
        yield end
        end.touch()
        parent.communicate()


def kept_until(end: Path, tmp_path: Path) -> Result:
    """What their next keeper ends with."""
    places = ["-D", tmp_path / "kept", "--run-directory", tmp_path / "run"]
    words = ["--job", "job", "--rank", 0, "--world", 1, "--store", tmp_path / "store", *places]
    timer = threading.Timer(1.0, end.touch)
    timer.start()
    try:
        return CliRunner().invoke(cli, ["job", "run", *map(str, words)])
    finally:
        timer.join()


def test_the_status_of_what_has_ended_before_its_next_keeper_came_is_known(
    left: Path,
    context: Context,  # noqa: F811
) -> None:
    """As long as nobody has heard of it."""
    left.touch()
    pid = context.state.pid
    wait_for(lambda: is_unheard(pid, context.state.start_time), "the end")
    assert not context.state.lives
    assert not is_unheard(pid, context.state.start_time + 1)
    supervisor = Supervisor(context, SETTINGS, print)
    assert supervisor._has_ended()
    assert supervisor._status == 3


@pytest.mark.parametrize("is_known", [True, False])
def test_a_status_that_is_not_known_is_no_success(
    is_known: bool,
    left: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before Linux 6.15 nobody but the parent may learn it."""
    monkeypatch.setattr(find, "find", lambda _: NO_CRIU)
    if not is_known:
        monkeypatch.setattr(stopping, "status_of", lambda *_: None)
    ended = kept_until(left, tmp_path)
    if is_known:
        assert ended.exit_code == 3
    else:
        assert isinstance(ended.exception, JobError)
        assert "rank 0: its tasks have ended, and their status is not known" in str(ended.exception)
