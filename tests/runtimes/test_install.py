# SPDX-License-Identifier: Apache-2.0
"""`gpustasis install` makes the engines use the plugin, with no other change; uninstall undoes
it."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpustasis.install import layout
from gpustasis.install.change import Change
from gpustasis.install.installation import install, uninstall
from gpustasis.install.root import Root
from support.engine_gpu import SteadyContainer, add_gpus
from support.engine_image import IMAGE, import_image
from support.engine_root import EngineRoot

# What the system itself writes while it runs, and what is mounted into it.
VOLATILE = ("proc", "sys", "dev", "run", "tmp", "var/lib/containers", "var/lib/containerd")
Facts = dict[str, tuple[object, ...]]


def whole(root: Path) -> Facts:
    """Every file of the system: type, mode, owner, and for a regular one size and time; contents
    below /etc, where files are rewritten."""
    found: Facts = {}
    todo = [root]
    while todo:
        for path in todo.pop().iterdir():
            name = str(path.relative_to(root))
            if name in VOLATILE:
                continue
            status = path.lstat()
            facts: tuple[object, ...] = (oct(status.st_mode), status.st_uid, status.st_gid)
            if stat.S_ISREG(status.st_mode):
                facts += (status.st_size, status.st_mtime_ns)
                if name.startswith("etc/"):
                    facts += (path.read_bytes(),)
            elif stat.S_ISDIR(status.st_mode) and path.stat().st_dev == root.stat().st_dev:
                todo.append(path)
            found[name] = facts
    return found


@pytest.fixture(scope="module")
def host(
    tmp_path_factory: pytest.TempPathFactory, steady_job: Path
) -> Iterator[tuple[EngineRoot, Facts]]:
    """A host of its own on which gpustasis is installed from outside; all its files before."""
    with EngineRoot(tmp_path_factory.mktemp("host")) as engines:
        import_image(engines, [steady_job])
        add_gpus(engines)
        for name in ("runc", "crun", "default"):  # add_gpus does by hand what is tested here
            engines.path(f"/etc/criu/{name}.conf").unlink()
        engines.write("/etc/criu/default.conf", "# the administrator's\nlog-pid", mode=0o640)
        before = whole(engines.path("/"))
        with Root(engines.path("/")) as root:
            install(root, "1.0", sys.executable, lambda change: None)
        yield engines, before


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_podman_checkpoints_gpu_memory(host: tuple[EngineRoot, Facts], runtime: str) -> None:
    """The job compares every byte; the hook has left the policy that the annotation asks for."""
    engines, _ = host
    annotation = ["--annotation", "io.gpustasis.threads=2"]
    container = SteadyContainer.run(engines, f"installed-{runtime}", runtime, *annotation, mib=8)
    (policy,) = engines.path("/run/gpustasis/policy").glob("*.toml")
    assert "threads = 2" in policy.read_text()
    engines.run("podman", "container", "checkpoint", container.name)
    account = json.loads(engines.path(f"{container.images()}/gpustasis-dump.json").read_text())
    assert [task["externalized"] for task in account["tasks"]] == [True]
    engines.run("podman", "container", "restore", container.name)
    container.run_on()
    container.remove()


def test_podman_runs_the_hook_for_annotations_only(host: tuple[EngineRoot, Facts]) -> None:
    """Seen by what a wrong annotation does: the container does not start."""
    engines, _ = host
    run = ["podman", "run", "--rm", "--network", "none"]
    engines.run(*run, "--annotation", "org.example.a=b", IMAGE, "/bin/sh", "-c", "exit 0")
    wrong = ["--annotation", "io.gpustasis.threads=many"]
    refused = engines.run(*run, *wrong, IMAGE, "/bin/sh", "-c", "exit 0", check=False)
    assert refused.returncode != 0
    assert layout.HOOK in refused.stderr


def test_uninstall_leaves_the_host_as_it_was(host: tuple[EngineRoot, Facts]) -> None:
    """The last of this file: it ends what the others use."""
    engines, before = host
    done: list[Change] = []
    with Root(engines.path("/")) as root:
        assert uninstall(root, done.append)
    assert {change.action for change in done} <= {"remove", "restore"}
    assert whole(engines.path("/")) == before
