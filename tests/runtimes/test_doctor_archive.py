# SPDX-License-Identifier: Apache-2.0
"""`gpustasis doctor --archive`: whether this host, or another one, can restore what Podman
exported."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.engine_gpu import Steady
from support.engine_root import EngineRoot

NAME = "moved.tar"


@pytest.fixture(scope="module")
def emulators() -> dict[str, list[str]]:
    """Other GPUs than those of the fixture `engines`: words for `gpustasis emulator start`."""
    return {
        "fewer": ["--gpus", "1", "--memory", "512MiB", "--driver", "580.95.05"],
        "smaller": ["--gpus", "2", "--memory", "2MiB", "--driver", "580.95.05"],
        "older": ["--gpus", "2", "--memory", "512MiB", "--driver", "570.86.15"],
    }


@pytest.fixture
def archive(engines: EngineRoot, steady: Steady, shared: Path) -> Iterator[Path]:
    """Of a GPU container with a directory of the host, exported by Podman; its name in the root is
    /mnt/shared/NAME."""
    engines.path("/opt/of-this-host").mkdir(exist_ok=True)
    container = steady("moved", "runc", "--volume", "/opt/of-this-host:/data", mib=8)
    engines.run(
        *["podman", "container", "checkpoint", "--compress", "none"],
        *["--export", f"/mnt/shared/{NAME}", container.name],
    )
    container.remove()
    yield shared / NAME
    (shared / NAME).unlink()


def doctor(root: EngineRoot, name: str = NAME, **environ: str) -> tuple[int, dict[str, Any]]:
    words = ["gpustasis", "doctor", "--json", "--archive", f"/mnt/shared/{name}"]
    done = root.run(*words, check=False, environ=environ)
    assert done.stdout, done.stderr
    return done.returncode, {f["name"]: f for f in json.loads(done.stdout)["findings"]}


def with_member(archive: Path, to: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """A copy in which one member's content is changed."""
    with tarfile.open(archive) as old, tarfile.open(to, "w") as new:
        for member in old:
            content = old.extractfile(member) if member.isfile() else None
            raw = content.read() if content is not None else b""
            if member.name == name:
                raw = change(raw)
                member.size = len(raw)
            new.addfile(member, io.BytesIO(raw) if content is not None else None)


def test_here_and_elsewhere(
    engines: EngineRoot,
    elsewhere: EngineRoot,
    archive: Path,
    shared: Path,
    emulators: dict[str, list[str]],
) -> None:
    engines.path("/opt/of-this-host").mkdir(exist_ok=True)
    status, found = doctor(engines)
    not_ok = {name: f["status"] for name, f in found.items() if f["status"] != "ok"}
    assert not_ok == {"root file system": "note"}, found  # the image's, which is not unpacked
    assert status == 0
    assert found["architecture"]["text"] == "X86_64"
    assert found["runtime"]["text"] == "runc"
    assert found["GPU"]["text"] == "the same ones"
    assert "needs no other" in found["parent"]["text"]

    # Another host: it lacks the directory, and cannot restore.
    status, found = doctor(elsewhere)
    assert status == 20
    assert [name for name, f in found.items() if f["status"] == "problem"] == ["mounts"]
    assert "has /opt/of-this-host mounted, which is not on this host" in found["mounts"]["text"]
    restore = ["podman", "--runtime", "runc", "container", "restore", "--import"]
    assert elsewhere.run(*restore, f"/mnt/shared/{NAME}", check=False).returncode != 0
    elsewhere.run("podman", "rm", "--force", "--ignore", "--time", "0", "moved")

    elsewhere.path("/opt/of-this-host").mkdir()
    runc = elsewhere.path("/usr/bin/runc").readlink()
    elsewhere.path("/usr/bin/runc").unlink()
    real = elsewhere.path("/usr/sbin/runc")
    away = real.rename(elsewhere.path("/opt/runc"))
    criu = elsewhere.path("/usr/sbin/criu").rename(elsewhere.path("/opt/criu"))
    _, found = doctor(elsewhere, GPUSTASIS_CRIU="/usr/sbin/criu")
    assert found["runtime"]["text"] == "the checkpoint was made by runc, which is not here"
    assert found["CRIU"]["status"] == "problem"
    away.rename(real)
    criu.rename(elsewhere.path("/usr/sbin/criu"))
    elsewhere.path("/usr/bin/runc").symlink_to(runc)

    said = {}
    for name, words in emulators.items():
        elsewhere.run("gpustasis", "emulator", "stop")
        elsewhere.run("gpustasis", "emulator", "start", *words)
        status, found = doctor(elsewhere)
        assert status == 20
        said[name] = {n: f["text"] for n, f in found.items() if f["status"] == "problem"}
    assert set(said["fewer"]) == {"GPU"}
    assert said["fewer"]["GPU"].startswith("lacking 1 x ")
    assert "GPU memory" in said["smaller"]
    assert "8.0 MiB needed" in said["smaller"]["GPU memory"]
    assert "CUDA driver" in said["older"]
    assert "this driver has 12.8 only" in said["older"]["CUDA driver"]
    elsewhere.run("gpustasis", "emulator", "stop")
    _, found = doctor(elsewhere)
    assert found["CUDA driver"]["status"] == "problem"
    elsewhere.run(
        *["gpustasis", "emulator", "start", "--gpus", "2", "--memory", "512MiB"],
        *["--driver", "580.95.05"],
    )

    def of_another_machine(core: bytes) -> bytes:
        assert core[12:14] == b"\x08\x01"  # core_entry.mtype: X86_64
        return core[:13] + b"\x03" + core[14:]

    with_member(archive, shared / "arm.tar", "checkpoint/core-1.img", of_another_machine)
    status, found = doctor(engines, "arm.tar")
    assert status == 20
    assert found["architecture"]["text"] == "it is of AARCH64, this host is X86_64"

    with_member(archive, shared / "damaged.tar", "checkpoint/pstree.img", lambda raw: raw[:9])
    status, found = doctor(engines, "damaged.tar")
    assert status == 20
    assert "is damaged" in found["checkpoint"]["text"]
    for name in ("arm.tar", "damaged.tar"):
        (shared / name).unlink()


def test_a_checkpoint_without_its_parent(engines: EngineRoot, steady: Steady, shared: Path) -> None:
    container = steady("child", "runc", mib=8)
    first, second = shared / "first", shared / "second"
    images = engines.path(container.images())
    for place in (first, second):
        if place is second:
            config = engines.path("/etc/gpustasis/config.toml")
            text = config.read_text()
            config.write_text(text + 'parent = "/mnt/shared/first"\n')
        engines.run("podman", "container", "checkpoint", "--keep", container.name)
        shutil.copytree(images, place, symlinks=True)
        engines.run("podman", "container", "restore", container.name)
    config.write_text(text)
    status, found = doctor(engines, "second")
    assert status == 0, found
    assert found["parent"]["text"].endswith("/first")
    first.rename(shared / "hidden")
    status, found = doctor(engines, "second")
    assert status == 20
    assert "it is built on checkpoint " in found["parent"]["text"]
    assert "is neither where its link leads nor in" in found["parent"]["text"]
    identity = found["parent"]["text"].split()[5].rstrip(",")
    store = engines.path("/var/lib/gpustasis/checkpoints")
    (store / identity).mkdir(parents=True)
    assert doctor(engines, "second")[0] == 20  # a name alone is no checkpoint
    shutil.copytree(shared / "hidden", store / identity, symlinks=True, dirs_exist_ok=True)
    status, found = doctor(engines, "second")
    assert status == 0, found
    shutil.rmtree(store)
    for name in ("hidden", "second"):
        shutil.rmtree(shared / name)
