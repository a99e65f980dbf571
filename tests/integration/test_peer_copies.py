# SPDX-License-Identifier: Apache-2.0
"""A node dies, and its jobs go on from their copies on a neighbour: real CRIU, real connections."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from campaigns.rig import Rig, with_config
from gpustasis.errors import PeerError
from gpustasis.image.arena import Tier, tier_of
from gpustasis.image.verification import verify_directory
from gpustasis.peers.copies import Copies
from gpustasis.peers.copying import copy, discard, fetch
from support.arena import dump, ram, restore
from support.criu_roots import criu_place
from support.json_output import check_document
from support.peers import Nodes, make_nodes, serving, write_config
from support.pids import await_free

Gpustasis = Callable[..., dict[str, Any]]


@pytest.fixture
def nodes(tmp_path: Path, arena: Path) -> Nodes:
    arena.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return make_nodes(tmp_path / "certificates", arena.parent / "peers")


@pytest.fixture
def keeper(nodes: Nodes) -> Iterator[Copies]:
    with serving(nodes.keeper) as server:
        yield server.copies


def lose(*directories: Path) -> None:
    """What was on the node is gone."""
    for directory in directories:
        shutil.rmtree(directory)


def test_a_job_comes_back_from_its_copy(
    newest_rig: Rig, nodes: Nodes, keeper: Copies, arena: Path
) -> None:
    rig = newest_rig
    with rig.job(mib=16, children=1, pinned_kib=64) as job:
        images = dump(rig, job, **ram(arena))
        job.wait()
        copied = Path(copy(images, nodes.sender).peer_directory)
        lose(images, arena)
        restore(rig, job, copied)


def test_one_that_is_built_on_others_does_too(
    newest_rig: Rig, nodes: Nodes, keeper: Copies, arena: Path
) -> None:
    """CPU memory in it as well, and each copied as soon as it is made, the job running on."""
    rig = newest_rig
    config = ram(arena, cpu_memory="ours")
    with rig.job(mib=16, children=1) as job:
        first = dump(rig, job, "--leave-running", **config)
        assert copy(first, nodes.sender).copies == 1
        job.run_on()
        second = dump(rig, job, "--leave-running", **config, parent=str(first))
        assert copy(second, nodes.sender).copies == 1
        job.run_on()
        third = dump(rig, job, **config, parent=str(second))
        job.wait()
        done = copy(third, nodes.sender)
        assert done.copies == 1
        assert len(keeper.all()) == 3
        lose(first, second, third, arena)
        restore(rig, job, Path(done.peer_directory))
        job.end()
        assert nodes.sender.peer is not None
        place = rig.images() / "back"
        assert len(fetch(nodes.sender.peer, nodes.sender, done.key, place)) == 3
        lose(keeper.directory)
        assert not verify_directory(place).problems
        restore(rig, job, place)


@pytest.fixture
def gpustasis(newest_rig: Rig, nodes: Nodes, arena: Path, tmp_path: Path) -> Gpustasis:
    """gpustasis(word, ...): what the command answers; of a node whose neighbour is `keeper`."""
    rig = with_config(newest_rig, ram(arena))
    config = write_config(tmp_path / "peer.toml", nodes.sender)
    environ = {**rig.environ, "GPUSTASIS_PEER_CONFIG": str(config)}

    def run(*words: str | Path, status: int = 0) -> dict[str, Any]:
        named = 2 if words[0] == "peer" else 1
        ended = subprocess.run(
            [sys.executable, "-m", "gpustasis", *words[:named], "--json", *words[named:]],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert ended.returncode == status, ended.stderr
        command = " ".join(map(str, words[:named]))
        return check_document(ended.stdout, command)

    return run


def test_checkpoint_waits_until_it_is_on_two_nodes(
    newest_rig: Rig, nodes: Nodes, keeper: Copies, gpustasis: Gpustasis
) -> None:
    store = newest_rig.images()
    with newest_rig.job(mib=8) as job:
        words = ("checkpoint", str(job.pid), "-R", "--wait", "peer")
        words = (*words, "--criu", criu_place(newest_rig.criu))
        made = gpustasis(*words, "-D", store / "one")
        job.run_on()
        assert (made["state"], made["peer"]) == ("local", str(nodes.sender.peer))
        (kept,) = keeper.all()
        assert (kept.store, kept.name) == (str(store), "one")
        assert gpustasis("wait", store / "one", "--for", "peer")["peer"] == made["peer"]
        gpustasis("drain", store / "one")
        assert tier_of(store / "one") == Tier.DURABLE
        assert not verify_directory(store / "one").problems
        # What is on the disk gets the copy that was asked for, too.
        made = gpustasis(*words, "--tier", "disk", "-D", store / "two")
        assert (made["state"], made["peer"]) == ("durable", str(nodes.sender.peer))
        assert [one.name for one in keeper.all()] == ["two"]
        job.run_on()


def test_the_neighbour_restores_from_its_copy_which_nobody_removes_meanwhile(
    newest_rig: Rig, nodes: Nodes, keeper: Copies, gpustasis: Gpustasis, arena: Path
) -> None:
    """The command, with the directory of the copy: for as long as it is at work."""
    rig = newest_rig
    script, reached, may_go = (rig.scratch / name for name in ("script", "reached", "may-go"))
    script.write_text(
        '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" = post-restore ] || exit 0\n'
        f"touch {reached}\n"
        f"while [ ! -e {may_go} ] && kill -0 $PPID; do sleep 0.1; done\n"  # as long as criu
    )
    script.chmod(0o755)
    criu = ("--criu", criu_place(rig.criu))
    with rig.job(mib=16, children=1) as job, ThreadPoolExecutor() as pool:
        images = rig.images()
        words = ("checkpoint", str(job.pid), "-D", images, "--wait", "peer", *criu)
        gpustasis(*words)
        job.wait()
        rig.settle(images)
        (kept,) = keeper.all()
        assert nodes.sender.peer is not None
        lose(images, arena)
        copied = keeper.directory / kept.key
        await_free(copied)
        words = ("restore", "-D", copied, *criu, "--", "--action-script", str(script))
        restored = pool.submit(gpustasis, *words)
        try:
            while not reached.exists():
                assert not restored.done(), restored.result()
                time.sleep(0.01)
            with pytest.raises(PeerError, match="is reading the copy"):
                discard(nodes.sender.peer, nodes.sender, kept.key)
            assert keeper.all() == [kept]
        finally:
            may_go.touch()
        found = restored.result()
        assert (found["directory"], found["pid"]) == (str(copied), job.pid)
        job.run_on()
        rig.settle(copied)
        discard(nodes.sender.peer, nodes.sender, kept.key)
        assert keeper.all() == []


def test_without_a_neighbour_nothing_is_dumped(
    newest_rig: Rig, nodes: Nodes, gpustasis: Gpustasis
) -> None:
    images = newest_rig.images()
    with newest_rig.job(mib=8) as job:
        words = ("checkpoint", str(job.pid), "-R", "--wait", "peer", "-D", images)
        refused = gpustasis(*words, "--criu", criu_place(newest_rig.criu), status=26)
        assert "cannot reach the neighbour" in refused["error"]["message"]
        assert not (images / "inventory.img").exists()
        job.run_on()


def test_a_neighbour_without_room_leaves_it_local(
    newest_rig: Rig, nodes: Nodes, gpustasis: Gpustasis
) -> None:
    images = newest_rig.images()
    with newest_rig.job(mib=8) as job, serving(replace(nodes.keeper, limit=4096)) as server:
        words = ("checkpoint", str(job.pid), "-R", "--wait", "peer", "-D", images)
        refused = gpustasis(*words, "--criu", criu_place(newest_rig.criu), status=26)
        assert "there is room for" in refused["error"]["message"]
        assert f"is in memory here, and has no copy: {images}" in refused["error"]["message"]
        assert server.copies.all() == []
        assert tier_of(images) == Tier.LOCAL
        assert not verify_directory(images).problems
        job.run_on()
