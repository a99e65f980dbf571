# SPDX-License-Identifier: Apache-2.0
"""doctor says of files that a job had open what CRIU will say of them, with every CRIU."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from gpustasis.criu.find import Criu
from gpustasis.criu.images import FILES_NAME, parse_open_files
from gpustasis.errors import ImageError
from gpustasis.image.checkpoint import find_manifest
from gpustasis.image.pack import packed_names
from support.job import Job

_JOB = """
import os, signal, sys
folder = sys.argv[1]
files = [open(f"{folder}/{name}", mode) for name, mode in
         (("written", "w"), ("appended", "a"), ("read", "r"), ("gone", "w"), ("grown", "a+"))]
for file in files:
    if file.mode != "r":
        file.write("four")
        file.flush()
os.unlink(f"{folder}/gone")
maps = open("/proc/self/maps")
print("ready", flush=True)
signal.pause()
"""

Gpustasis = Callable[..., CompletedProcess[str]]


@pytest.fixture
def job(launch: Callable[..., Job], tmp_path: Path) -> Job:
    """One that has files below tmp_path open in several ways."""
    (tmp_path / "read").write_text("read")
    started = launch([sys.executable, "-c", _JOB, str(tmp_path)])
    started.wait_for("ready")
    return started


@pytest.mark.parametrize("layout", ["criu", "packed"])
def test_it_says_what_criu_says(
    criu: Criu, gpustasis: Gpustasis, job: Job, images: Path, tmp_path: Path, layout: str
) -> None:
    program = ("--criu", str(criu.root or criu.program))

    def said() -> tuple[int, dict[str, Any]]:
        ended = gpustasis("doctor", "--json", "--archive", images, *program)
        found = {one["name"]: one for one in json.loads(ended.stdout)["findings"]}
        return ended.returncode, found["open files"]

    def restore() -> CompletedProcess[str]:
        ended = gpustasis("restore", "-D", images, *program)
        if ended.returncode != 0:
            with suppress(ChildProcessError):
                job.wait()  # what criu has killed may be a child of ours by then, and hold its pid
        return ended

    words = (*program, "--layout", layout)
    dumped = gpustasis("checkpoint", str(job.pid), "-D", images, *words)
    assert dumped.returncode == 0, dumped.stderr
    assert (images / FILES_NAME).exists() == (layout == "criu")
    manifest = find_manifest(images)
    if layout == "packed":
        assert manifest is not None
        assert {FILES_NAME, f"core-{job.pid}.img"} <= packed_names(images, manifest)
    job.wait()

    with (tmp_path / "appended").open("a") as file:
        file.write("more")  # CRIU does not compare it
    assert said()[1]["status"] == "ok"

    with (tmp_path / "written").open("a") as file:
        file.write("more")
    status, finding = said()
    assert status == 20 and finding["status"] == "problem"
    assert finding["text"] == f"{tmp_path}/written has 8 bytes, and had 4"
    refused = restore()
    assert refused.returncode == 12 and "written has bad size 8" in refused.stderr
    assert "that is: the job had that file open" in refused.stderr
    assert "plugin: criu failed" not in refused.stderr

    for name, text in (("written", "is no regular file"), ("read", "cannot be found")):
        (tmp_path / name).unlink()
        if name == "written":
            (tmp_path / name).mkdir()
        assert text in said()[1]["text"]
    assert restore().returncode == 12

    (tmp_path / "written").rmdir()
    for name in ("written", "read"):
        (tmp_path / name).write_text("four")
    assert said()[1]["status"] == "ok"
    restored = restore()
    assert restored.returncode == 0, restored.stderr


def test_a_damaged_list(criu: Criu, gpustasis: Gpustasis, job: Job, images: Path) -> None:
    words = ("checkpoint", str(job.pid), "-D", images, "--criu", str(criu.root or criu.program))
    dumped = gpustasis(*words)
    assert dumped.returncode == 0, dumped.stderr
    job.wait()
    raw = (images / FILES_NAME).read_bytes()
    paths = {os.path.basename(path): size for path, size in parse_open_files(raw, "x").values()}
    assert {"written": 4, "read": 4, "gone": 4, "grown": 4}.items() <= paths.items()
    assert not {"appended", "null"} & paths.keys()
    for size in range(0, len(raw), 7):
        try:
            parse_open_files(raw[:size], "x")
        except ImageError:
            continue
    with pytest.raises(ImageError, match="is not a list of files"):
        parse_open_files(raw[:6], "x")

    def said() -> tuple[str, str]:
        findings = json.loads(gpustasis("doctor", "--json", "--archive", images).stdout)["findings"]
        (found,) = [one for one in findings if one["name"] == "open files"]
        return found["status"], found["text"]

    (images / FILES_NAME).write_bytes(raw[:-1])
    status, text = said()
    assert status == "problem" and "is damaged" in text
    (images / "mountpoints-12.img").touch()  # then paths are not those of the host
    status, text = said()
    assert status == "note" and "not compared" in text
