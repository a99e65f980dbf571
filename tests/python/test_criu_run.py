# SPDX-License-Identifier: Apache-2.0
"""Whose word counts in a dump that gpustasis starts, with every CRIU: what was asked for in this
run, above a container's annotations, above the host's file. Said by the dump itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpustasis._core import read_manifest
from gpustasis.criu.find import Criu
from gpustasis.criu.plugin import SYSTEM_CONFIG
from support.checkpoint import Checkpointer
from support.container import Container, cgroup, container
from support.criu_roots import criu_place
from support.job import Job
from support.job_ranks import PROGRAMS

HOST = 'threads = 5\nincremental = true\ncompress = "none"\nchunk_size = 4096\n'
# In a mount namespace of its own: $1 is the directory that lies over /etc then. What was open
# before is not of this namespace.
WITH_HOST_FILE = """
mount -t overlay overlay -o "lowerdir=$1:/etc" /etc
shift
log=$(readlink /proc/self/fd/2)
exec "$@" </dev/null >>"$log" 2>&1
"""


@pytest.fixture
def made() -> Iterator[Container]:
    with container() as found:
        yield found


@pytest.fixture
def host_file(tmp_path: Path) -> Path:
    """A directory that holds the host's file, at its place below /etc."""
    over = tmp_path / "over"
    place = over / SYSTEM_CONFIG.relative_to("/etc")
    place.parent.mkdir(parents=True)
    place.write_text(HOST)
    return over


def said(images: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((images / "gpustasis-dump.json").read_text())
    return found


def checkpoint(
    criu: Criu, environ: dict[str, str], pid: int, images: Path, *words: str | Path
) -> None:
    """From the job's own mount namespace: from another one criu would dump each tmpfs of this
    machine, by tar, which fails where another program writes a file meanwhile."""
    images.mkdir()
    environ = {name: text for name, text in environ.items() if name != "GPUSTASIS_CONFIG"}
    ended = subprocess.run(
        [
            *["nsenter", f"--mount=/proc/{pid}/ns/mnt"],
            *[sys.executable, "-m", "gpustasis", "checkpoint", "--leave-running"],
            *["--criu", criu_place(criu), str(pid), "-D", images, *words],
        ],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_the_host_s_file_keeps_its_place_below_the_annotations(
    criu: Criu,
    launch_cuda: Callable[..., Job],
    compile_cuda: Callable[..., Path],
    emulator_environ: dict[str, str],
    host_file: Path,
    made: Container,
    tmp_path: Path,
) -> None:
    """Named for this run it would win over them, and `incremental` of it would meet `parent`."""
    program = compile_cuda(PROGRAMS / "gpu_generations.c")
    space = [Path("/usr/bin/env"), "unshare", "--mount", "sh", "-ec", WITH_HOST_FILE, "sh"]
    job = launch_cuda([*space, host_file, program, "8", "1", "4"])
    job.wait_for("ready")
    with cgroup(made.container_id) as folder:
        (folder / "cgroup.procs").write_text(str(job.pid))
        done = made.create(job.pid, compress="lz4", incremental="false")
        assert done.returncode == 0, done.stderr
        one, two, three = (tmp_path / name for name in ("one", "two", "three"))
        for images, words in (
            (one, ()),
            (two, ("--threads", "2")),
            (three, ("--threads", "2", "--parent", one)),
        ):
            checkpoint(criu, emulator_environ, job.pid, images, *words)
            found = said(images)
            assert found["config"].startswith(f"{SYSTEM_CONFIG}, {made.policy}")
            assert found["config"].count(",") == (2 if words else 1)
            assert found["threads"] == (2 if words else 5)
            (task,) = found["tasks"]
            # The annotation's word, with the host's chunks, which nobody else speaks of.
            assert task["lz4"]["chunks"] > 0 or task["ref"]["chunks"] > 0
            assert task["staged_bytes"] / 4096 == sum(
                task[kind]["chunks"] for kind in ("zero", "lz4", "raw", "ref")
            )
            assert read_manifest(images).chain_length == (1 if images == three else 0)
        job.end()


def test_a_file_that_was_named_is_left_to_the_plugin(
    checkpointer: Checkpointer, gpu_generations: Callable[..., Job], tmp_path: Path
) -> None:
    """And what an outer run has set stands, but for what this one says itself."""
    named, earlier = tmp_path / "named.toml", tmp_path / "earlier.toml"
    named.write_text("threads = 5\nchunk_size = 4096\n")
    earlier.write_text('threads = 6\nincremental = true\ncompress = "none"\n')
    job = gpu_generations()
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    environ = dict(checkpointer.environ) | {"GPUSTASIS_CONFIG": str(named)}
    inner = Checkpointer(checkpointer.criu, environ)
    inner.dump(job, one, leave_running=True, plugin={"threads": 3})
    assert said(one)["threads"] == 3
    assert said(one)["config"].startswith(f"{named}, ")
    nested = Checkpointer(checkpointer.criu, environ | {"GPUSTASIS_OVERRIDES": str(earlier)})
    nested.dump(job, two, leave_running=True, plugin={"parent": str(one), "threads": 7})
    assert said(two)["threads"] == 7
    assert read_manifest(two).chain_length == 1
    (task,) = said(two)["tasks"]
    assert task["lz4"]["chunks"] == 0  # as the earlier file has it
    job.end()
