# SPDX-License-Identifier: Apache-2.0
"""A job in a cgroup named like a container's: its policy, its store, restores without either."""

from __future__ import annotations

import fcntl
import json
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from campaigns.rig import Rig, small_filesystem
from campaigns.steady_job import SteadyJob
from gpustasis._core import ARENA_MARKER, PARENT_LINK, read_manifest
from gpustasis.image.prune import Action, Rules, prune
from support.arena import ram
from support.container import Container, cgroup, container


@contextmanager
def contained(rig: Rig, made: Container, **options: int) -> Iterator[SteadyJob]:
    """A job in the container's cgroup."""
    with cgroup(made.container_id) as folder, rig.job(**options) as job:
        for pid in job.pids:
            (folder / "cgroup.procs").write_text(str(pid))
        yield job


@pytest.fixture
def made() -> Iterator[Container]:
    with container() as found:
        yield found


def ask(made: Container, job: SteadyJob, **annotations: str) -> None:
    done = made.create(job.pid, **annotations)
    assert done.returncode == 0, done.stderr


def statistics(images: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((images / "gpustasis-dump.json").read_text())
    return found


def test_a_chain_whose_image_directories_the_engine_deletes(rig: Rig, made: Container) -> None:
    small: dict[str, bool | int | str] = {"chunk_size": 4096}  # more of them stay the same
    with contained(rig, made, mib=16) as job:
        ask(made, job, incremental="true", compress="none", threads="1", keep="2")
        for number in range(3):
            images = rig.images()
            dumped = rig.dump(job, images, "--leave-running", config=small)
            assert dumped.status == 0, dumped.errors
            found = statistics(images)
            assert found["config"].startswith(f"defaults, {made.policy}, ")
            assert (found["threads"], found["not_kept_because"]) == (1, "")
            assert found["tasks"][0]["lz4"]["chunks"] == 0
            assert read_manifest(images).chain_length == number
            assert (found["tasks"][0]["ref"]["chunks"] > 0) == (number > 0)
            shutil.rmtree(images)
            job.run_on()

        last = rig.images()
        dumped = rig.dump(job, last, config=small)
        assert dumped.status == 0, dumped.errors
        assert job.wait() == -signal.SIGKILL
        rig.settle(last)
        assert made.mark.exists()
        assert (last / PARENT_LINK).resolve().parent == made.store

        # Elsewhere the link leads nowhere: the parent is found by its id, or is said to be missing.
        moved = rig.images() / "a" / "b"
        moved.parent.mkdir()
        shutil.move(last, moved)
        (moved / PARENT_LINK).unlink()
        (moved / PARENT_LINK).symlink_to("../nowhere")
        hidden = made.store.parent.parent / f"{made.store.name}-hidden"
        made.store.rename(hidden)
        try:
            failed = rig.restore(moved)
        finally:
            hidden.rename(made.store)
        assert failed.status != 0
        assert f"checkpoint {read_manifest(moved).parent_id.hex()}, is not in" in failed.log
        restored = rig.restore(moved)
        assert restored.status == 0, restored.errors
        job.run_on()

        # The policy outlives this end, and retention leaves what the last two are built on.
        assert made.stop().returncode == 0
        assert made.policy.exists()
        verdicts = prune(made.store, Rules(last=1), dry_run=True).verdicts
        found = {verdict.entry.name: verdict.action for verdict in verdicts}
        assert found.pop("newest") is Action.IGNORED  # a link
        assert list(found.values()) == [Action.KEPT] * 4


def test_a_container_without_policy_is_dumped_as_the_host_says(
    newest_rig: Rig, made: Container
) -> None:
    with contained(newest_rig, made, mib=2) as job:
        images = newest_rig.images()
        dumped = newest_rig.dump(job, images, "--leave-running", config={"threads": 3})
        assert dumped.status == 0, dumped.errors
        assert statistics(images)["threads"] == 3
        assert str(made.policy) not in statistics(images)["config"]
        assert not made.store.exists()


def test_a_dump_into_memory_is_refused_before_anything_is_locked(
    newest_rig: Rig, made: Container, arena: Path
) -> None:
    """As a host's configuration may ask for it: the engine takes the image directory away."""
    with contained(newest_rig, made, mib=2) as job:
        images = newest_rig.images()
        dumped = newest_rig.dump(job, images, "--leave-running", config=ram(arena))
        assert dumped.status != 0
        assert f'tier = "ram": not for a container ({made.container_id})' in dumped.log
        assert "locked pid" not in dumped.log
        assert not (images / ARENA_MARKER).exists()
        assert not arena.exists()
        job.run_on()


def test_the_first_task_says_which_container_it_is(newest_rig: Rig, made: Container) -> None:
    """It need not use CUDA itself, and its child may be anywhere."""
    with (
        cgroup(made.container_id) as folder,
        newest_rig.job(mib=2, cuda=0, children=1) as job,
        container() as other,
        cgroup(other.container_id) as elsewhere,
    ):
        (folder / "cgroup.procs").write_text(str(job.pid))
        ask(made, job, threads="2")
        (elsewhere / "cgroup.procs").write_text(str(job.pids[1]))
        assert other.create(job.pids[1], threads="3").returncode == 0
        images = newest_rig.images()
        dumped = newest_rig.dump(job, images, "--leave-running")
        assert dumped.status == 0, dumped.errors
        assert statistics(images)["threads"] == 2
        job.run_on()
        job.end()


def test_what_is_named_for_one_run_wins_over_the_policy(newest_rig: Rig, made: Container) -> None:
    with contained(newest_rig, made, mib=2) as job:
        ask(made, job, threads="2", compress="none", incremental="true")
        parent, images = newest_rig.images(), newest_rig.images()
        dumped = newest_rig.dump(job, parent, "--leave-running")
        assert dumped.status == 0, dumped.errors
        config: dict[str, bool | int | str] = {"threads": 3, "parent": str(parent)}
        dumped = newest_rig.dump(job, images, "--leave-running", config=config)
        assert dumped.status == 0, dumped.errors
        found = statistics(images)
        assert found["config"].startswith(f"defaults, {made.policy}, ")
        assert found["threads"] == 3
        assert found["tasks"][0]["lz4"]["chunks"] == 0
        assert found["parent"]["directory"] == str(parent)
        assert len([path for path in made.store.iterdir() if path.is_dir()]) == 2


def no_toml(path: Path) -> None:
    path.write_text("threads = [")


def host_key(path: Path) -> None:
    path.write_text('driver = "/tmp/libcuda.so"\n' + path.read_text())


def writable(path: Path) -> None:
    path.chmod(0o666)


def symlink(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def huge(path: Path) -> None:
    path.write_text(path.read_text() + "#" * (65 << 10))


@pytest.mark.parametrize("spoil", [no_toml, host_key, writable, symlink, huge])
def test_a_hostile_policy_fails_the_dump_and_not_the_job(
    newest_rig: Rig, made: Container, spoil: Callable[[Path], None]
) -> None:
    rig = newest_rig
    with contained(rig, made, mib=2) as job:
        ask(made, job, threads="1")
        try:
            spoil(made.policy)
            images = rig.images()
            failed = rig.dump(job, images, "--leave-running")
        finally:
            made.policy.with_suffix(".real").unlink(missing_ok=True)
        assert failed.status != 0
        assert (
            f"Error (gpustasis): cuda_plugin: PAUSE_DEVICES: pid {job.pid}: {made.policy}"
            in failed.log
        )
        assert "locked pid" not in failed.log
        assert not list(images.glob("gpustasis-*.img"))
        job.run_on()


def test_a_tree_without_cuda_is_dumped_in_spite_of_its_policy_and_that_is_said(
    newest_rig: Rig, made: Container
) -> None:
    with contained(newest_rig, made, cuda=0, mib=1) as job:
        ask(made, job, **{"cpu-memory": "ours"})
        images = newest_rig.images()
        try:
            symlink(made.policy)
            dumped = newest_rig.dump(job, images, "--leave-running")
        finally:
            made.policy.with_suffix(".real").unlink(missing_ok=True)
        assert dumped.status == 0, dumped.errors
        assert f"as without a policy: {made.policy} is a symbolic link" in dumped.log
        job.run_on()


def test_two_dumps_of_one_container_at_once(newest_rig: Rig, made: Container) -> None:
    rig = newest_rig
    with contained(rig, made, mib=8) as job:
        ask(made, job, incremental="true")
        first = rig.images()
        dumped = rig.dump(job, first, "--leave-running")
        assert dumped.status == 0, dumped.errors

        # As the other dump holds it.
        with (made.store / ".dump.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            failed = rig.dump(job, rig.images(), "--leave-running")
        assert failed.status != 0
        assert "another dump of this container is under way" in failed.log
        assert "locked pid" not in failed.log
        job.run_on()

        places = [rig.images() for _ in range(2)]
        words = [rig.dump_words(job, images, ["--leave-running"]) for images in places]
        statuses = [criu.wait(60) for criu in [rig.start(line) for line in words]]
        assert 0 in statuses
        for images in places:
            rig.settle(images)
        job.run_on()
        newest = (made.store / "newest").resolve()
        done = [images for images, status in zip(places, statuses, strict=True) if status == 0]
        known = {read_manifest(images).checkpoint_id for images in done}
        assert read_manifest(newest).checkpoint_id in known


def test_a_store_without_room_costs_the_next_parent_and_not_the_checkpoint(
    newest_rig: Rig, made: Container
) -> None:
    rig = newest_rig
    made.store.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with small_filesystem(made.store, 256 << 10, 0), contained(rig, made, mib=8) as job:
        ask(made, job, incremental="true")
        for _ in range(2):
            images = rig.images()
            dumped = rig.dump(job, images, "--leave-running")
            assert dumped.status == 0, dumped.errors
            assert "No space left on device" in statistics(images)["not_kept_because"]
            assert (
                "Warn (gpustasis): cuda_plugin: not kept" in dumped.log
                or "not kept for" in dumped.log
            )
            assert read_manifest(images).chain_length == 0
            assert [path for path in made.store.iterdir() if path.is_dir()] == []
            job.run_on()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"parent": "/x"}, "not together with incremental"),
        ({"externalize": False}, "incremental: needs externalize"),
        ({}, "names a container"),
    ],
)
def test_incremental_that_cannot_be_fails_the_dump(
    newest_rig: Rig, config: dict[str, bool | int | str], reason: str
) -> None:
    rig = newest_rig
    with rig.job(mib=2) as job:
        failed = rig.dump(
            job, rig.images(), "--leave-running", config={"incremental": True} | config
        )
        assert failed.status != 0
        assert reason in failed.log
        job.run_on()
