# SPDX-License-Identifier: Apache-2.0
"""What `gpustasis job` says to somebody who has given it something wrong, with a store for one
host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpustasis.cli import cli
from gpustasis.criu import find
from gpustasis.criu.find import Criu
from gpustasis.errors import CheckpointError
from gpustasis.jobs import epochs
from gpustasis.jobs.local import Local
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.records import Keys, Plan, phase_text
from gpustasis.jobs.server import Server
from gpustasis.jobs.store import Put, Store
from support.job_ranks import ANSWER_S

KEYS = Keys("train")
Refusal = Callable[..., str]


@pytest.fixture
def store(tmp_path: Path, journal: Path) -> Iterator[Store]:
    server = Server(tmp_path / "store", journal)
    client = Local(tmp_path / "store", ANSWER_S)
    yield client
    client.close()
    server.close()


@pytest.fixture
def refusal(tmp_path: Path) -> Refusal:
    """refusal(*words) -> the error of `gpustasis job words` with that store."""

    def said(*words: str) -> str:
        environ = {"GPUSTASIS_STORE": str(tmp_path / "store")}
        error = CliRunner().invoke(cli, ["job", *words], env=environ).exception
        assert isinstance(error, CheckpointError), error
        return str(error)

    return said


def epoch(store: Store, plan: Plan, phase: Phase, note: str) -> int:
    """One that has ended."""
    number = epochs.begin(store, KEYS, plan)
    store.write([], [Put(KEYS.phase(number), phase_text(plan, phase, note))])
    return number


def test_a_checkpoint_of_the_wrong_size_is_not_asked_for_again(
    store: Store, refusal: Refusal
) -> None:
    """--world of an aborted epoch does not count where one with another number was made."""
    words = ("checkpoint", "train", "--look-limit", "0.1")
    assert "say by --world" in refusal(*words)
    epoch(store, Plan(world=3, leave_running=True), Phase.ABORTED, "why not")
    assert "3 ranks not joined" in refusal(*words)
    epoch(store, Plan(world=2, leave_running=True), Phase.COMMITTED, "0" * 64)
    epoch(store, Plan(world=3, leave_running=True), Phase.ABORTED, "why not")
    said = refusal(*words)
    assert "2 ranks not joined within 0.1 s: 0, 1; each rank needs a `gpustasis job run`" in said


def test_a_name_that_no_job_has(store: Store, refusal: Refusal) -> None:
    for words in (("list",), ("show",), ("verify",), ("restore",), ("prune", "--keep-last", "1")):
        assert "`gpustasis job list` shows those" in refusal(words[0], "trian", *words[1:])
    assert "`gpustasis job run --restarts`" in refusal("recoveries", "trian")
    assert "must be 1 to 128 letters, digits" in refusal("list", "no/name")


def test_no_store(refusal: Refusal, tmp_path: Path) -> None:
    said = refusal("list")
    assert f"no store answers at {tmp_path / 'store'}: No such file or directory" in said
    assert "`gpustasis agent run`" in said


def test_a_keeper_with_nothing_to_keep(
    store: Store, refusal: Refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = Criu(program=Path("/none"), root=None, version=(4, 2), origin="test")
    monkeypatch.setattr(find, "find", lambda _: none)
    words = ("run", "--job", "train", "--rank", "0", "--world", "1")
    words += ("-D", str(tmp_path / "kept"), "--run-directory", str(tmp_path / "run"))
    assert "job train, rank 0: no earlier keeper has left tasks here: give a command" in refusal(
        *words
    )


def test_the_list_names_what_a_restore_has_brought_back(store: Store, tmp_path: Path) -> None:
    digest = "0" * 64
    one = epoch(store, Plan(world=1, leave_running=True), Phase.COMMITTED, digest)
    epoch(store, Plan(world=1, leave_running=True, restores=one), Phase.COMMITTED, digest)
    said = CliRunner().invoke(cli, ["job", "list", "--store", str(tmp_path / "store")]).output
    (line,) = (line for line in said.splitlines() if " restore " in line)
    assert line.split()[-3:] == ["of", "epoch", str(one)]
