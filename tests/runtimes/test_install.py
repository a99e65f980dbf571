"""`cudackpt install` makes the engines use the plugin, with no other change; uninstall undoes it."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cudackpt.install import layout
from cudackpt.install.change import Change
from cudackpt.install.installation import install, uninstall
from cudackpt.install.root import Root
from runtimes.test_engine_root import COUNT, numbers, wait_for_more
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
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineRoot, Facts]]:
    """A host of its own on which cudackpt is installed from outside; all its files before."""
    with EngineRoot(tmp_path_factory.mktemp("host")) as engines:
        import_image(engines)
        engines.write("/etc/criu/default.conf", "# the administrator's\nlog-pid", mode=0o640)
        before = whole(engines.path("/"))
        with Root(engines.path("/")) as root:
            install(root, "1.0", sys.executable, lambda change: None)
        yield engines, before


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_podman_finds_the_plugin(host: tuple[EngineRoot, Facts], runtime: str) -> None:
    engines, _ = host
    engines.run(
        *["podman", "--runtime", runtime, "run", "--detach", "--network", "none"],
        *["--name", runtime, IMAGE, "/bin/sh", "-c", COUNT],
    )
    wait_for_more(engines, runtime)
    engines.run("podman", "container", "checkpoint", "--keep", runtime)
    (log,) = engines.path("/var/lib/containers").glob("storage/*/*/userdata/dump.log")
    text = log.read_text(errors="replace")
    assert 'Plugin "cuda_plugin"' in text
    before = numbers(engines, runtime)
    engines.run("podman", "container", "restore", runtime)
    wait_for_more(engines, runtime)
    after = numbers(engines, runtime)
    assert after == list(range(1, len(after) + 1))
    assert len(after) > len(before)
    engines.run("podman", "rm", "--force", "--time", "0", runtime)


def test_podman_runs_the_hook_for_annotations_only(host: tuple[EngineRoot, Facts]) -> None:
    """Seen by what an unknown annotation does: the container does not start."""
    engines, _ = host
    run = ["podman", "run", "--rm", "--network", "none"]
    engines.run(*run, "--annotation", "org.example.a=b", IMAGE, "/bin/sh", "-c", "exit 0")
    refused = engines.run(
        *[*run, "--annotation", "io.cudackpt.no-such=1", IMAGE, "/bin/sh", "-c", "exit 0"],
        check=False,
    )
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
