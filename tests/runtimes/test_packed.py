# SPDX-License-Identifier: Apache-2.0
"""layout = "packed" of Podman's containers, with runc and with crun: they have mounts and networks,
which CRIU saves with other programs, and end only with a checkpoint that is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from gpustasis._core import PACK_NAME, PackReader
from support.engine_gpu import Steady
from support.engine_policy import add_hook
from support.engine_root import EngineRoot
from support.json_output import check_document

Gpustasis = Callable[..., CompletedProcess[str]]
RUNTIMES = ["runc", "crun"]
LAYOUT = ("--annotation", "io.gpustasis.layout=packed")
MARK = "in a file of a tmpfs"


@pytest.fixture(autouse=True)
def hook(engines: EngineRoot) -> None:
    add_hook(engines)


@contextmanager
def small(root: EngineRoot, place: str, size: str) -> Iterator[None]:
    """A file system of that size lies over `place`, a directory in the root that is not there."""
    root.path(place).mkdir(mode=0o700)
    root.run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place)
    try:
        yield
    finally:
        root.run("umount", place)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_container_comes_back_from_one_file(steady: Steady, runtime: str) -> None:
    words = (*LAYOUT, "--tmpfs", "/scratch")
    container = steady(f"packed-{runtime}", runtime, *words, mib=8, children=1)
    root, name = container.root, container.name
    root.run("podman", "exec", name, "/bin/sh", "-c", f"echo '{MARK}' > /scratch/file")
    root.run("podman", "container", "checkpoint", name)
    images = root.path(container.images())
    found = {path.name for path in images.glob("*.img")}
    assert PACK_NAME in found
    open_images = {one for one in found if not one.startswith(("gpustasis-", "ids-"))}
    assert open_images == {"inventory.img", "pstree.img"}
    packed = {file.name for file in PackReader.open(images).files}
    assert any(one.startswith("tmpfs-") for one in packed), packed
    assert not list(images.glob("*.tar.gz.img"))
    root.run("podman", "container", "restore", name)
    container.run_on(2)
    said = root.run("podman", "exec", name, "/bin/sh", "-c", "cat /scratch/file").stdout
    assert said == MARK + "\n"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_an_archive_of_a_packed_checkpoint(
    steady: Steady, gpustasis: Gpustasis, shared: Path, runtime: str
) -> None:
    container = steady(f"export-{runtime}", runtime, *LAYOUT, mib=8)
    root, name = container.root, container.name
    archive, inside = shared / f"{name}.tar", f"/mnt/shared/{name}.tar"
    words = ("--compress", "none", "--export", inside)
    root.run("podman", "container", "checkpoint", *words, name)

    def run(*words: str | Path) -> str:
        done = gpustasis(*words)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    shown = check_document(run("inspect", "--json", archive), "inspect")
    assert shown["layout"] == "packed" and len(shown["processes"]) == 1
    assert "of CRIU's images whole" in run("verify", archive)
    flat, plain = shared / f"{name}-flat", shared / f"{name}-plain"
    run("flatten", archive, "-o", flat)
    run("verify", flat)
    run("flatten", flat, "-o", plain, "--layout", "criu")
    assert (plain / "core-1.img").exists() and not (plain / PACK_NAME).exists()
    shown = check_document(run("inspect", "--json", flat), "inspect")
    assert shown["processes"][0]["comm"] == "steady_job"

    content = bytearray(archive.read_bytes())
    at = content.index((flat / PACK_NAME).read_bytes()) + 5000
    content[at] ^= 1
    damaged = shared / f"{name}-damaged.tar"
    damaged.write_bytes(content)
    done = gpustasis("verify", damaged)
    assert done.returncode == 10 and PACK_NAME in done.stdout

    root.run("podman", "rm", "--force", name)
    root.run("podman", "container", "restore", "--import", inside)
    container.run_on()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_pack_that_finds_no_space_leaves_the_container_running(
    steady: Steady, runtime: str
) -> None:
    """criu's log is on another file system: on the full one it ends before its last sentences."""
    container = steady(f"full-{runtime}", runtime, *LAYOUT, cuda=0, mib=16)
    root, name, place = container.root, container.name, container.images()
    with small(root, place, "4m"):
        done = root.run("podman", "container", "checkpoint", name, check=False)
        assert done.returncode != 0
        log = root.path(place).with_name("dump.log").read_text()
        assert 'layout = "packed": ' in log and "No space left on device" in log
        assert "Dumping FAILED" in log
        container.run_on()
        assert "inventory.img" not in root.run("ls", place).stdout
    state = root.run("podman", "container", "inspect", "--format", "{{.State.Status}}", name)
    assert state.stdout.strip() == "running"
    root.run("podman", "container", "checkpoint", name)
    root.run("podman", "container", "restore", name)
    container.run_on()
