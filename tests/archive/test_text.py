# SPDX-License-Identifier: Apache-2.0
"""What an archive says reaches a terminal as text that does nothing there, and ends no command in a
traceback: escape sequences, control characters, names that are no UTF-8, half of a surrogate
pair."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from support.archives import config_dump
from support.image_samples import make_checkpoint, mixture

EVIL = "x\x1b[2J\x07\x9b\u202e\ud800\r\n\tq"
WORDS = {
    "inspect": ["inspect"],
    "inspect --json": ["inspect", "--json"],
    "verify": ["verify"],
    "flatten": ["flatten", "-o", "out"],
    "doctor --archive": ["doctor", "--archive"],
    "build-image": ["build-image", "-t", "name"],
    "kubelet list": ["kubelet", "list", "."],
    "kubelet list --json": ["kubelet", "list", "--json", "."],
}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    images = tmp_path / "images"
    images.mkdir()
    make_checkpoint(images, {7: mixture()})
    config = config_dump() | dict.fromkeys(("name", "runtime", "rootfsImage", "createdTime"), EVIL)
    files = {"config.dump": json.dumps(config).encode(), "spec.dump": b"{}"}
    files |= {f"checkpoint/{path.name}": path.read_bytes() for path in images.iterdir()}
    files["checkpoint/gpustasis-8.img"] = b"no image"
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("checkpoint/gpustasis-parent\udcff\x1b[2J")
        link.type, link.linkname = tarfile.SYMTYPE, "/\udcfe\x1b[2J"
        tar.addfile(link)
    return path


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS.keys())
@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_text_of_an_archive(archive: Path, words: list[str], locale: str) -> None:
    argv = [sys.executable, "-m", "gpustasis", *words]
    if words[-1] != ".":
        argv.append(archive.name)
    environ = {"LC_ALL": locale, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONUTF8": "0"}
    ended = subprocess.run(argv, cwd=archive.parent, env=environ, capture_output=True, check=False)
    said = ended.stdout + ended.stderr
    assert said and b"Traceback" not in said, said.decode(errors="replace")
    text = said.decode()  # UTF-8
    assert all(char.isprintable() or char in "\n\t" for char in text), text.encode()
