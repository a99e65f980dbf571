# SPDX-License-Identifier: Apache-2.0
"""containerd 1.7 cannot checkpoint through CRI; the command says so, and what works there does."""

from __future__ import annotations

import shlex
from pathlib import Path

from gpustasis_bench.roots import roots_directory
from support.asked_again import done_once_frozen
from support.containerd_node import ContainerdNode
from support.engine_root import EngineRoot

PROGRAMS = Path("/opt/containerd-1.7")


def test_containerd_1_7(tmp_path: Path, job_program: Path) -> None:
    here = roots_directory() / "containerd-1.7/root/usr/bin"
    assert here.is_dir(), f"{here} is missing; ci/test-root containerd-1.7 makes it"
    place = tmp_path / "root"
    place.mkdir()
    with (
        EngineRoot(place, binds={str(PROGRAMS): here}) as root,
        ContainerdNode(root, job_program, old=PROGRAMS) as node,
    ):
        assert node.cri.runtime().startswith("containerd 1.7.")
        job = node.pod("trainer").job("job")
        words = ("gpustasis", "containerd", "checkpoint", job.path, "--export", "/tmp/a.tar")
        done = root.run(*words, check=False)
        assert done.returncode == 16
        assert f"has no CheckpointContainer, so container {job.path}" in done.stderr
        assert "containerd has it from 2.0 on" in done.stderr
        assert not root.path("/tmp/a.tar").exists()
        job.run_on()
        advice = done.stderr.strip().rsplit(": ", 1)[1].replace("DIR", "/tmp/images")
        words = (PROGRAMS / "ctr", *shlex.split(advice)[1:])
        done_once_frozen(lambda: root.run(*words, check=False))
        assert "1 image whole" in root.run("gpustasis", "verify", "/tmp/images").stdout
        job.run_on()
