# SPDX-License-Identifier: Apache-2.0
"""`gpustasis inspect`: what a checkpoint holds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpustasis._core import image_name
from gpustasis.cli import cli
from gpustasis.criu.images import parse_comm
from gpustasis.errors import ImageError
from support.deadlines import run_with_deadline
from support.image_samples import PAGE, make_checkpoint, mixture

CORE_MAGIC = bytes.fromhex("1943565447380555")
PSTREE_MAGIC = bytes.fromhex("1943565430302750")


def record(message: bytes) -> bytes:
    return len(message).to_bytes(4, "little") + message


def core_image(comm: bytes) -> bytes:
    """As CRIU writes it: mtype, thread_info of 3 bytes, tc with task_state, sigset and comm."""
    task = bytes.fromhex("0801 1000 290000000000000000") + bytes([0x32, len(comm)]) + comm
    return CORE_MAGIC + record(bytes.fromhex("0801 1203080110 1a") + bytes([len(task)]) + task)


def add_criu_images(directory: Path) -> None:
    tasks = [(6, 0, 1, b"bash"), (7, 6, 2, b"train"), (8, 6, 1, b"odd [red]")]
    pstree = b""
    for pid, ppid, threads, comm in tasks:
        numbers = bytes([0x08, pid, 0x10, ppid, 0x18, 6, 0x20, 6])
        numbers += b"".join(bytes([0x28, pid + i]) for i in range(threads))
        pstree += record(numbers)
        (directory / f"core-{pid}.img").write_bytes(core_image(comm))
    (directory / "pstree.img").write_bytes(PSTREE_MAGIC + pstree)


def add_statistics(directory: Path, backend: str = "driver") -> None:
    statistics = {
        "version": 1,
        "stage": "dump",
        "result": "ok",
        "error": "",
        "backend": backend,
        "tasks": [],
        "phases_ms": {"lock": 1.5, "write": 20.25},
    }
    (directory / "gpustasis-dump.json").write_text(json.dumps(statistics))


def inspect_json(directory: Path) -> Any:
    result = CliRunner().invoke(cli, ["inspect", "--json", str(directory)])
    assert result.exception is None, result.exception
    return json.loads(result.output)


def test_json_says_everything(tmp_path: Path) -> None:
    manifest = make_checkpoint(tmp_path, {7: mixture()}, staged_in_criu=(8,))
    add_criu_images(tmp_path)
    add_statistics(tmp_path)
    found = inspect_json(tmp_path)
    assert found["version"] == 1
    assert found["checkpoint_id"] == manifest.checkpoint_id.hex()
    assert (found["backend"], found["driver_version"]) == ("driver", "580.95.05")
    assert found["driver_api_version"] == 13000
    assert found["timings_ms"] == {"dump": {"lock": 1.5, "write": 20.25}}
    (gpu,) = found["gpus"]
    assert gpu == {
        "uuid": "GPU-a5a5a5a5-a5a5-a5a5-a5a5-a5a5a5a5a5a5",
        "name": "NVIDIA H200",
        "memory_bytes": 150754820096,
    }
    assert [(p["pid"], p["ppid"], p["comm"], p["threads"]) for p in found["processes"]] == [
        (6, 0, "bash", 1),
        (7, 6, "train", 2),
        (8, 6, "odd [red]", 1),
    ]
    bash, train, odd = (process["cuda"] for process in found["processes"])
    assert bash is None
    assert odd == {
        "state_before": "running",
        "externalized": False,
        "gpu_source": "unknown",
        "gpus": [],
        "image": None,
    }
    assert train["gpu_source"] == "nvml"
    assert train["gpus"] == [{"number": 0, "uuid": gpu["uuid"], "memory_bytes": 24 << 20}]
    image = train["image"]
    size = (tmp_path / image_name(7)).stat().st_size
    assert (image["file"], image["file_bytes"]) == ("gpustasis-7.img", size)
    assert found["gpu_image_bytes"] == size
    everything = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert found["other_bytes"] == everything - size
    assert image["plain_bytes"] == 7 * PAGE
    assert image["digest"] == manifest.tasks[0].digest.hex()
    assert image["regions"][0] == {
        "address": 0x7F0000000000,
        "length": 4 * PAGE,
        "protection": "rw-",
        "kind": "private",
    }
    assert {name: count["chunks"] for name, count in image["encodings"].items()} == {
        "zero": 2,
        "lz4": 3,
        "raw": 2,
        "ref": 0,
        "alike": 0,
    }


@pytest.mark.parametrize("name", ["pstree.img", "core-7.img", "gpustasis-dump.json"])
def test_a_fifo_is_not_waited_for(tmp_path: Path, name: str) -> None:
    make_checkpoint(tmp_path, {7: mixture()})
    add_criu_images(tmp_path)
    add_statistics(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    result = run_with_deadline(lambda: CliRunner().invoke(cli, ["inspect", str(tmp_path)]))
    assert isinstance(result.exception, ImageError)
    assert f"{name}: is no ordinary file" in str(result.exception)


def test_people_get_a_tree(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, {7: mixture()}, staged_in_criu=(8,))
    add_criu_images(tmp_path)
    add_statistics(tmp_path, backend="emulator")
    output = CliRunner().invoke(cli, ["inspect", str(tmp_path)]).output
    for text in (
        "emulator: no real GPU",
        "580.95.05, CUDA 13.0",
        "lock 1.5 ms, write 20.2 ms",
        "└── [6] bash",
        "├── [7] train, 2 threads, CUDA",
        "zero: 0.0 MiB in 0.0 MiB, 2 chunks",
        "7f0000000000-7f0000004000 rw- private",
        "[8] odd [red], CUDA, GPU memory in CRIU's own images",
    ):
        assert text in output, text


def test_a_checkpoint_of_stock_criu_is_shown_too(tmp_path: Path) -> None:
    add_criu_images(tmp_path)
    found = inspect_json(tmp_path)
    assert found["checkpoint_id"] is None
    assert len(found["processes"]) == 3


def test_cuda_tasks_outside_the_tree_are_not_lost(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, {70: mixture()})
    add_criu_images(tmp_path)
    assert [process["pid"] for process in inspect_json(tmp_path)["processes"]] == [6, 7, 8, 70]


@pytest.mark.parametrize("wrong", ["empty", "image missing", "image damaged", "core missing"])
def test_what_is_no_whole_checkpoint_is_one_error(tmp_path: Path, wrong: str) -> None:
    if wrong != "empty":
        make_checkpoint(tmp_path, {7: mixture()})
        add_criu_images(tmp_path)
    if wrong == "image missing":
        (tmp_path / image_name(7)).unlink()
    if wrong == "image damaged":
        (tmp_path / image_name(7)).write_bytes(b"\0" * 1000)
    if wrong == "core missing":
        (tmp_path / "core-7.img").unlink()
    result = CliRunner().invoke(cli, ["inspect", str(tmp_path)])
    assert isinstance(result.exception, ImageError)
    assert "\n" not in str(result.exception)


class TestCommOfProcess:
    def test_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "core-7.img").write_bytes(core_image(b"train"))
        assert parse_comm((tmp_path / "core-7.img").read_bytes(), "core-7.img") == "train"

    def test_every_truncation_is_reported(self, tmp_path: Path) -> None:
        whole = core_image(b"train")
        for keep in range(len(whole)):
            (tmp_path / "core-7.img").write_bytes(whole[:keep])
            with pytest.raises(ImageError, match="core-7"):
                parse_comm((tmp_path / "core-7.img").read_bytes(), "core-7.img")

    def test_any_bytes_are_read_or_refused(self, tmp_path: Path) -> None:
        whole = core_image(b"train")
        for at in range(12, len(whole)):
            for value in (0x00, 0x7F, 0x80, 0xFF):
                raw = bytearray(whole)
                raw[at] = value
                (tmp_path / "core-7.img").write_bytes(raw)
                try:
                    parse_comm((tmp_path / "core-7.img").read_bytes(), "core-7.img")
                except ImageError as exc:
                    assert "core-7.img is damaged" in str(exc)
