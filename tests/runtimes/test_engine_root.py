# SPDX-License-Identifier: Apache-2.0
"""The system that the engines run in: it is separate, it can checkpoint, and it leaves nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from gpustasis import __version__
from support.engine_image import IMAGE
from support.engine_root import EngineRoot

# It counts without starting a program: CRIU cannot stop a process that waits in vfork(2).
COUNT = "mkfifo /tmp/f; exec 3<>/tmp/f; i=0; while :; do echo $((i+=1)); read -t 0.05 x <&3; done"


def numbers(root: EngineRoot, name: str) -> list[int]:
    return [int(line) for line in root.run("podman", "logs", name).stdout.split()]


def wait_for_more(root: EngineRoot, name: str, count: int = 3) -> None:
    wanted = len(numbers(root, name)) + count
    deadline = time.monotonic() + 60
    while len(numbers(root, name)) < wanted:
        assert time.monotonic() < deadline, root.run("podman", "logs", name).stdout
        time.sleep(0.1)


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_podman_checkpoints_and_restores(engines: EngineRoot, runtime: str) -> None:
    name = f"count-{runtime}"
    engines.run(
        *["podman", "--runtime", runtime, "run", "--detach", "--network", "none"],
        *["--name", name, IMAGE, "/bin/sh", "-c", COUNT],
    )
    wait_for_more(engines, name)
    engines.run("podman", "container", "checkpoint", name)
    before = numbers(engines, name)
    engines.run("podman", "container", "restore", name)
    wait_for_more(engines, name)
    after = numbers(engines, name)
    assert after == list(range(1, len(after) + 1)) and len(after) > len(before)
    engines.run("podman", "rm", "--force", "--time", "0", name)


def test_the_package_is_there(engines: EngineRoot) -> None:
    assert __version__ in engines.run("gpustasis", "--version").stdout


def groups(name: str) -> list[Path]:
    return [path for path in Path("/sys/fs/cgroup").glob(f"**/{name}") if path.is_dir()]


def test_nothing_is_left(tmp_path: Path) -> None:
    place, shared = tmp_path / "root", tmp_path / "shared"
    place.mkdir()
    shared.mkdir()
    with EngineRoot(place, shared={"/mnt/shared": shared}) as root:
        root.write("/usr/bin/mine", "#!/bin/sh\n")
        child = root.start("sleep", "1000", stdout=None)
        root.run("touch", "/mnt/shared/file")
        init = root.init
        assert groups(root.name)
    child.wait()
    assert list(place.iterdir()) == []
    assert (shared / "file").exists()
    assert groups(root.name) == []
    assert not os.path.exists(f"/proc/{init}")
    assert str(place) not in Path("/proc/self/mountinfo").read_text()


def test_a_reboot(tmp_path: Path) -> None:
    """What is on the disk stays, and nothing else does: no process, frozen ones among them, no
    mount, no group."""
    place = tmp_path / "root"
    place.mkdir()
    with EngineRoot(place) as root:
        version_1 = root.path("/sys/fs/cgroup/freezer").exists()
        group = "/sys/fs/cgroup/freezer/frozen" if version_1 else "/sys/fs/cgroup/frozen"
        freeze = "echo FROZEN >$0/freezer.state" if version_1 else "echo 1 >$0/cgroup.freeze"
        stands = "mkdir $0; sleep 1000 & echo $! >$0/cgroup.procs && " + freeze
        root.run("sh", "-c", stands, group)
        root.run("mount", "--bind", "/etc", "/mnt")
        root.write("/run/volatile", "")
        root.write("/var/lib/kept", "kept")
        init = root.init
        root.reboot()
        assert not os.path.exists(f"/proc/{init}")
        assert root.run("pgrep", "-x", "sleep", check=False).returncode == 1
        assert root.path("/var/lib/kept").read_text() == "kept"
        assert not root.path("/run/volatile").exists()
        assert not (root.path("/mnt") / "passwd").exists()
        assert not root.path(group).exists()
        assert __version__ in root.run("gpustasis", "--version").stdout
    assert groups(root.name) == []
