# SPDX-License-Identifier: Apache-2.0
"""Files that the processes of a container had mapped: CRIU makes the container's mounts itself, so
they are compared when its processes stand, before any of them runs; by `doctor --archive`
sooner."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpustasis._core import FileIdentity, FilePlace, read_manifest
from support.engine_gpu import Steady, write_config
from support.engine_image import IMAGE
from support.engine_root import EngineRoot
from support.library import CompileC, changed, library, replace

LIBRARY = "/data/library.so"


@pytest.fixture
def mapped(shared: Path, compile_c: CompileC, tmp_path: Path) -> Iterator[Path]:
    """A library without a build id, which containers see as LIBRARY."""
    path = shared / "library.so"
    replace(path, library(compile_c, tmp_path, "none"))
    yield path
    path.unlink(missing_ok=True)


def findings(root: EngineRoot, *words: str) -> dict[str, Any]:
    done = root.run("gpustasis", "doctor", "--json", "--archive", *words, check=False)
    return {found["name"]: found for found in json.loads(done.stdout)["findings"]}


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_a_changed_library_ends_the_restore_before_anything_runs(
    engines: EngineRoot, steady: Steady, mapped: Path, runtime: str
) -> None:
    preload = ("--volume", "/mnt/shared:/data", "--env", f"LD_PRELOAD={LIBRARY}")
    container = steady(f"library-{runtime}", runtime, *preload, mib=4, children=1)
    engines.run("podman", "container", "checkpoint", container.name)
    requirements = read_manifest(engines.path(container.images())).requirements
    assert requirements is not None
    assert requirements.unrecorded == 0
    assert {file.place for file in requirements.files} == {FilePlace.CONTAINER}
    files = {file.path: file for file in requirements.files}
    assert files[LIBRARY].identity == FileIdentity.CONTENT
    assert files["/bin/steady_job"].identity == FileIdentity.BUILD_ID

    before = container.step_numbers()
    old = mapped.read_bytes()
    replace(mapped, changed(old))
    restore = ("podman", "container", "restore", container.name)
    assert engines.run(*restore, check=False).returncode != 0
    failed = json.loads(engines.path(f"{container.images()}/gpustasis-restore.json").read_text())
    assert f"{LIBRARY} has hash " in failed["error"]
    assert container.state() == "exited"
    assert container.step_numbers() == before
    if runtime == "crun":
        return  # after a restore that failed crun cannot do another here: devices.deny
    write_config(engines, 'requirements = "ignore"')
    try:
        engines.run(*restore)
    finally:
        write_config(engines)
    container.run_on(2)
    engines.run("podman", "container", "checkpoint", container.name)
    engines.run(*restore)
    container.run_on(2)


def test_an_archive_is_compared_with_mounts_and_root_file_system(
    engines: EngineRoot, steady: Steady, mapped: Path, shared: Path
) -> None:
    preload = ("--volume", "/mnt/shared:/data", "--env", f"LD_PRELOAD={LIBRARY}")
    container = steady("library-archive", "runc", *preload, mib=4)
    archive = "/mnt/shared/library.tar"
    engines.run("podman", "container", "checkpoint", "--export", archive, container.name)
    container.remove()
    try:
        found = findings(engines, archive)
        assert found["mapped files"]["status"] == "ok"
        assert found["root file system"]["status"] == "note"
        rootfs = engines.run("podman", "image", "mount", IMAGE).stdout.strip()
        found = findings(engines, archive, "--rootfs", rootfs)
        assert found["mapped files"]["status"] == "ok", found
        assert "root file system" not in found
        replace(mapped, changed(mapped.read_bytes()))
        found = findings(engines, archive, "--rootfs", rootfs)
        assert found["mapped files"]["status"] == "problem"
        said = f"{LIBRARY} (here /mnt/shared/library.so) has hash "
        assert found["mapped files"]["text"].startswith(said)
        found = findings(engines, archive, "--rootfs", "/opt")
        assert "/bin/steady_job" in found["root file system"]["text"]
        assert found["root file system"]["status"] == "note"
    finally:
        (shared / "library.tar").unlink()
