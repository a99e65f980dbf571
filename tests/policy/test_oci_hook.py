# SPDX-License-Identifier: Apache-2.0
"""The OCI hook as a program of its own: what it leaves, what it refuses, and how long it takes."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpustasis.image.checkpoint import find_manifest
from support.chains import make_chain, make_link, memory_of
from support.container import Container, container, hook_words, process_in, run_hook

START_BOUND_S = 2.0  # generous: docs/performance.md says how long it takes


@pytest.fixture
def made() -> Iterator[Container]:
    with container() as found:
        yield found


@pytest.fixture
def pid(made: Container) -> Iterator[int]:
    with process_in(made) as found:
        yield found


def test_a_policy_is_made_and_removed(made: Container, pid: int) -> None:
    done = made.create(pid, compress="none", timeout="30s", keep="3", incremental="true")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    found = tomllib.loads(made.policy.read_text())
    assert found.pop("container") == {
        "id": made.container_id,
        "keep": 3,
        "annotations": {
            "io.gpustasis.compress": "none",
            "io.gpustasis.incremental": "true",
            "io.gpustasis.keep": "3",
            "io.gpustasis.timeout": "30s",
        },
    }
    assert found == {"compress": "none", "lock_timeout_ms": 30_000, "incremental": True}
    assert made.policy.stat().st_mode & 0o7777 == 0o600
    assert made.policy.parent.stat().st_mode & 0o7777 == 0o700
    again = made.create(pid, threads="2")
    assert again.returncode == 0, again.stderr
    assert tomllib.loads(made.policy.read_text())["threads"] == 2
    assert made.stop().returncode == 0
    assert not made.policy.exists()
    assert made.stop().returncode == 0


def test_after_a_checkpoint_the_policy_stays_once(made: Container, pid: int) -> None:
    assert made.create(pid, threads="2").returncode == 0
    made.mark.touch(mode=0o600)  # as the plugin does
    assert made.stop().returncode == 0
    assert made.policy.exists()
    assert not made.mark.exists()
    made.mark.touch(mode=0o600)  # its end was missed
    assert made.create(pid, threads="2").returncode == 0
    assert not made.mark.exists()
    assert made.stop().returncode == 0
    assert not made.policy.exists()


@pytest.mark.parametrize(
    ("annotation", "sentence"),
    [
        ({"threads": "many"}, 'annotation io.gpustasis.threads = "many": must be a number from 0'),
        ({"encrypt": "age1"}, "the host's configuration says for whom"),
        ({"colour": "red"}, "there is no such annotation"),
    ],
)
def test_a_wrong_annotation_stops_the_start(
    made: Container, pid: int, annotation: dict[str, str], sentence: str
) -> None:
    done = made.create(pid, **annotation)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert done.stderr.startswith("gpustasis: ")
    assert done.stderr.count("\n") == 1
    assert not made.policy.exists()


def test_the_policy_of_a_rank_stays(made: Container, pid: int) -> None:
    """A restore that was refused ends so, and the next one must not be taken for no rank's."""
    assert made.create(pid, job="train", rank="0", world="2").returncode == 0
    made.mark.touch()
    for _ in range(2):
        assert made.stop().returncode == 0
        assert (made.policy.exists(), made.mark.exists()) == (True, False)
    made.policy.write_text("[[")
    assert made.stop().returncode != 0
    assert not made.policy.exists()


def test_a_cgroup_without_the_id_stops_the_start(made: Container) -> None:
    done = made.create(os.getpid(), threads="2")
    assert done.returncode == 1
    assert "no cgroup of its process carries its id" in done.stderr
    assert not made.policy.exists()


@pytest.mark.parametrize("wrong", ["../../etc/x", "web", "", "a" * 300, "A" * 64, "0" * 63 + "/"])
def test_an_id_that_is_none_is_refused_only_with_annotations(made: Container, wrong: str) -> None:
    state = made.state("creating", os.getpid(), {"io.gpustasis.threads": "1"}) | {"id": wrong}
    done = run_hook(state)
    assert done.returncode == 1
    assert "need an id of 64 hex digits" in done.stderr
    assert run_hook(state | {"annotations": {}}).returncode == 0
    assert run_hook(state | {"status": "stopped", "pid": 0}).returncode == 0


@pytest.mark.parametrize(
    "state",
    [
        "io.gpustasis.",
        '"gpustasis"',
        '["gpustasis"]',
        '{"gpustasis": 1}',
        '{"id": 1, "status": "gpustasis"}',
        '{"id": "x", "status": "creating", "annotations": ["io.gpustasis.x"]}',
        '{"id": "x", "status": "creating", "pid": "gpustasis"}',
        '{"id": "x", "status": "creating", "pid": -1, "x": "gpustasis"}',
        "[" * 100_000 + "gpustasis",
        '{"id": "x", "status": "creating", "x": "gpustasis' + "x" * (1 << 20) + '"}',
    ],
    ids=range(10),
)
def test_a_state_that_is_none_is_refused(state: str) -> None:
    done = run_hook(state)
    assert done.returncode == 1
    assert done.stderr.startswith("gpustasis: the state on stdin")
    assert done.stderr.count("\n") == 1


def test_letters_written_as_numbers_hide_nothing(made: Container, pid: int) -> None:
    state = json.dumps(made.state("creating", pid, {"io.gpustasis.threads": "many"}))
    hidden = state.replace("gpustasis", "\\u0067pustasi\\u0073")
    done = run_hook(hidden)
    assert done.returncode == 1
    assert "io.gpustasis.threads" in done.stderr


def test_the_stage_can_be_given(made: Container, pid: int) -> None:
    state = made.state("created", pid, {"io.gpustasis.threads": "2"})
    # At a restore, runc's state says "stopped" although there is a process.
    assert run_hook(state | {"status": "stopped"}).returncode == 0
    assert made.policy.exists()
    assert run_hook(state, "poststop").returncode == 0
    assert not made.policy.exists()
    assert run_hook(state, "createRuntime").returncode == 0
    assert made.policy.exists()
    wrong = run_hook(state, "prestart")
    assert wrong.returncode == 1
    assert "usage: " in wrong.stderr


def test_what_crun_would_lose_goes_through_its_log_and_stderr(
    made: Container, pid: int, tmp_path: Path
) -> None:
    """It gives hooks no stderr. Here a program with the same options is in its place."""
    log = tmp_path / "oci-log"
    log.touch()
    state = json.dumps(made.state("creating", pid, {"io.gpustasis.threads": "many"}))
    stand_in = "import subprocess as s, sys; sys.exit(s.call(sys.argv[4:], stderr=s.DEVNULL))"
    runtime = subprocess.run(
        [sys.executable, "-c", stand_in, "--log-format=json", "--log", str(log), *hook_words()],
        input=state,
        text=True,
        env={},
        capture_output=True,
        check=False,
    )
    assert runtime.returncode == 1
    sentence = 'annotation io.gpustasis.threads = "many": must be a number from 0 to 1024'
    assert runtime.stderr == f"gpustasis: {sentence}\n"
    assert json.loads(log.read_text())["msg"] == f"gpustasis: {sentence}"
    assert made.refusal.read_text() == f"{sentence}\n"
    assert made.create(pid, threads="2").returncode == 0
    assert not made.refusal.exists()


def test_links_and_files_of_others_are_not_followed(
    made: Container, pid: int, tmp_path: Path
) -> None:
    assert made.create(pid, threads="2").returncode == 0
    victim = tmp_path / "victim"
    victim.write_text("precious")
    made.policy.unlink()
    made.policy.symlink_to(victim)
    part = made.policy.with_name(f".{made.policy.name}.part")
    part.symlink_to(victim)
    assert made.create(pid, threads="3").returncode == 0
    assert not made.policy.is_symlink()
    assert tomllib.loads(made.policy.read_text())["threads"] == 3
    assert victim.read_text() == "precious"
    made.policy.unlink()
    made.policy.symlink_to(victim)
    done = made.stop()
    assert done.returncode == 1
    assert str(made.policy) in done.stderr
    assert victim.read_text() == "precious"


def test_a_directory_in_the_policys_place_is_named(made: Container, pid: int) -> None:
    assert made.create(pid, threads="2").returncode == 0
    made.policy.unlink()
    made.policy.mkdir()
    try:
        for done in (made.create(pid, threads="2"), made.stop()):
            assert done.returncode == 1
            assert done.stderr.startswith("gpustasis: cannot ")
            assert str(made.policy) in done.stderr
            assert done.stderr.count("\n") == 1
    finally:
        made.policy.rmdir()


def test_retention_when_the_container_ends(made: Container, pid: int) -> None:
    """`keep` counts the newest; what those are built on stays as well."""
    made.store.mkdir(mode=0o700, parents=True)
    chain = make_chain(made.store, 2)
    for number, name in enumerate(("full", "later", "last")):
        make_link(made.store / name, {7: memory_of(["a"])}, taken=1_900_000_000 + number)
    assert made.create(pid, keep="2").returncode == 0
    done = made.stop()
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.name for path in made.store.iterdir()) == ["last", "later"]

    top = make_link(
        made.store / "top", {7: memory_of(["a", "B"])}, parent=made.store / "later", taken=2e9
    )
    assert top.chain_length == 1
    assert made.create(pid, keep="1").returncode == 0
    assert made.stop().returncode == 0
    assert sorted(path.name for path in made.store.iterdir()) == ["later", "top"]
    assert all(not path.exists() for path in chain)
    assert find_manifest(made.store / "later") is not None


def test_no_retention_through_a_link(made: Container, pid: int, tmp_path: Path) -> None:
    """Nor where others could write: what lies there may be somebody else's."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    for number, name in enumerate(("older", "newer")):
        make_link(elsewhere / name, {7: memory_of(["a"])}, taken=1_900_000_000 + number)
    made.store.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made.store.symlink_to(elsewhere)
    try:
        assert made.create(pid, keep="1").returncode == 0
        done = made.stop()
    finally:
        made.store.unlink()
    assert done.returncode == 1
    assert str(made.store) in done.stderr
    assert sorted(path.name for path in elsewhere.iterdir()) == ["newer", "older"]

    elsewhere.rename(made.store)
    made.store.chmod(0o770)
    assert made.create(pid, keep="1").returncode == 0
    done = made.stop()
    assert done.returncode == 1
    assert "others could write there" in done.stderr
    assert sorted(path.name for path in made.store.iterdir()) == ["newer", "older"]


def test_a_container_without_annotations_hardly_waits() -> None:
    """The bound is for a slow machine; the least of some runs tells of the program."""
    state = Container(secrets.token_hex(32)).state("creating", os.getpid(), {"org.example": "x"})
    text = json.dumps(state)
    times = []
    for _ in range(5):
        begin = time.monotonic()
        done = subprocess.run(
            hook_words(), input=text, text=True, env={}, capture_output=True, check=True
        )
        times.append(time.monotonic() - begin)
        assert done.stdout == done.stderr == ""
    assert min(times) < START_BOUND_S


def test_the_hook_imports_little() -> None:
    """What costs most at the start of Python is imports: these would be a third more each."""
    words = hook_words()
    words[words.index("-c") : words.index("-c")] = ["-X", "importtime"]
    state = Container(secrets.token_hex(32)).state("creating", 1, {})
    done = subprocess.run(
        words, input=json.dumps(state), text=True, env={}, capture_output=True, check=True
    )
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "gpustasis.oci_hook" in names
    assert not names & {"re", "json", "tomllib", "pathlib", "typing", "dataclasses", "click"}
