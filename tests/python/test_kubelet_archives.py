# SPDX-License-Identifier: Apache-2.0
"""`gpustasis kubelet list`: one row for each archive, one reason for each that is none."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from gpustasis.archive.layout import Engine
from gpustasis.errors import ArchiveError, CheckpointError
from gpustasis.runtimes.kubelet_archives import list_archives, read_archive
from support.json_output import check_document

CONFIG = {
    "id": "0123456789abcdef" * 4,
    "name": "name-of-config",
    "rootfsImageName": "registry.test/app:1",
    "runtime": "runc",
    "createdTime": "2026-01-02T03:04:05.678901234Z",
}
NOTES = {
    Engine.PODMAN: {"io.container.manager": "libpod"},
    Engine.CRI_O: {
        "io.container.manager": "cri-o",
        "io.kubernetes.cri-o.Metadata": '{"name": "name-of-crio"}',
        "io.kubernetes.cri-o.Created": "2026-01-02T03:04:06Z",
    },
    Engine.CONTAINERD: {"io.kubernetes.cri.container-name": "name-of-containerd"},
}


def write_archive(path: Path, engine: Engine, **members: bytes) -> None:
    """members: "_" stands for "." in their names."""
    content = {
        "config.dump": json.dumps(CONFIG).encode(),
        "spec.dump": json.dumps({"annotations": NOTES[engine]}).encode(),
        "checkpoint/inventory.img": b"i" * 24,
        "checkpoint/pages-1.img": b"p" * 4072,
        "rootfs-diff.tar": b"r" * 340,
    } | {name.replace("_", "."): text for name, text in members.items()}
    with tarfile.open(path, "w") as tar:
        for name, text in content.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text))


def command(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "gpustasis", "kubelet", "list", *words, str(directory)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)


def test_the_columns(tmp_path: Path) -> None:
    """Those of checkpointctl show."""
    for engine in NOTES:
        write_archive(tmp_path / f"checkpoint-{engine}.tar", engine)
    (tmp_path / "notes.txt").write_text("no archive")
    done = command(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split("  ") for line in done.stdout.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    image = ["registry.test/app:1", "0123456789ab", "runc"]
    assert cells[0] == [
        *("CONTAINER", "IMAGE", "ID", "RUNTIME", "CREATED", "ENGINE"),
        *("CHKPT SIZE", "ROOT FS DIFF SIZE"),
    ]
    assert cells[1:] == [
        ["name-of-containerd", *image, "2026-01-02T03:04:05Z", "containerd", "4.0 KiB", "340 B"],
        ["name-of-crio", *image, "2026-01-02T03:04:06Z", "CRI-O", "4.0 KiB", "340 B"],
        ["name-of-config", *image, "2026-01-02T03:04:05Z", "Podman", "4.0 KiB", "340 B"],
    ]


def test_json(tmp_path: Path) -> None:
    write_archive(tmp_path / "one.tar", Engine.CRI_O)
    said = command(tmp_path, "--json").stdout
    (found,) = check_document(said, "kubelet list")["archives"]
    assert found["path"] == str(tmp_path / "one.tar")
    assert found["container_id"] == CONFIG["id"]
    assert (found["checkpoint_bytes"], found["rootfs_diff_bytes"]) == (4096, 340)


def test_what_is_none_is_said_beside_the_others(tmp_path: Path) -> None:
    write_archive(tmp_path / "good.tar", Engine.CONTAINERD)
    write_archive(tmp_path / "cut.tar", Engine.CONTAINERD)
    os.truncate(tmp_path / "cut.tar", 2000)
    write_archive(tmp_path / "odd.tar", Engine.CONTAINERD, spec_dump=b"[]")
    write_archive(tmp_path / "deep.tar", Engine.CONTAINERD, config_dump=b"[" * 200_000)
    write_archive(tmp_path / "large.tar", Engine.CONTAINERD, config_dump=b" " * (5 << 20))
    (tmp_path / "link.tar").symlink_to("good.tar")
    os.mkfifo(tmp_path / "fifo.tar")
    (tmp_path / "empty.tar").touch()
    done = command(tmp_path)
    assert done.returncode == 13
    assert len(done.stdout.splitlines()) == 1 + 1
    archives, errors = list_archives(tmp_path)
    assert [archive.path.name for archive in archives] == ["good.tar"]
    reasons = {str(error).split(":")[0].rsplit("/")[-1]: str(error) for error in errors}
    assert sorted(reasons) == [
        *("cut.tar", "deep.tar", "empty.tar", "fifo.tar", "large.tar", "link.tar", "odd.tar")
    ]
    assert "is cut short" in reasons["cut.tar"]
    assert "spec.dump: is no JSON object" in reasons["odd.tar"]
    assert "4194304 are the limit" in reasons["large.tar"]
    assert "no regular file" in reasons["fifo.tar"]


def test_a_terminal_is_left_alone(tmp_path: Path) -> None:
    config = CONFIG | {"rootfsImageName": "a\x1b[2Jb\n" + "x" * 10_000}
    raw = json.dumps(config).encode()
    write_archive(tmp_path / "one.tar", Engine.PODMAN, config_dump=raw)
    done = command(tmp_path)
    assert "a\\x1b[2Jb\\nxxx" in done.stdout and "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 1000


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot list .*No such file") as caught:
        list_archives(tmp_path / "none")
    assert caught.value.exit_code == CheckpointError.exit_code  # it is no damage
    with pytest.raises(ArchiveError, match="cannot be read: No such file"):
        read_archive(tmp_path / "none.tar")
