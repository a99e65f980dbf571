# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that hold CPU memory, of tasks with CUDA (7) and without (8), one built on another:
every reader knows them."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import xxhash
from click.testing import CliRunner, Result

from gpustasis._core import (
    MANIFEST_NAME,
    CorruptDataError,
    GpuSource,
    ImageReader,
    Manifest,
    ManifestTask,
    MemoryKind,
    TaskGpu,
    UnsupportedDataError,
    image_name,
    read_manifest,
    write_manifest,
)
from gpustasis.cli import cli
from gpustasis.errors import ImageError, UnsupportedError
from gpustasis.text import mib
from support.archives import pack
from support.chains import contents, make_link, memory_of
from support.image_samples import PAGE
from support.plain_manifest import parse_manifest
from support.plain_reader import PlainImage, PlainSource

CPU = MemoryKind.CPU
KINDS = (MemoryKind.GPU, CPU)
GPU_WORDS = ["A", "b", "0", "C"]
CPU_WORDS = ["M", "b", "0", "N", "O"]
OLDER = ["M", "P", "b"]


@pytest.fixture
def chain(tmp_path: Path) -> tuple[Path, Path]:
    """The second refers to CPU memory of the first from its GPU memory, and the other way."""
    one, two = tmp_path / "one", tmp_path / "two"
    make_link(one, {7: memory_of(GPU_WORDS)}, cpu_memory={7: memory_of(OLDER), 8: memory_of(["Q"])})
    make_link(
        two,
        {7: memory_of(["A", "Q", "x"])},
        cpu_memory={7: memory_of(CPU_WORDS), 8: memory_of(["A", "R"])},
        parent=one,
    )
    return one, two


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def places(directory: Path) -> list[tuple[int, MemoryKind]]:
    return [(task.pid, task.kind) for task in read_manifest(directory).tasks]


def test_names(chain: tuple[Path, Path]) -> None:
    names = [task.image_name for task in read_manifest(chain[1]).tasks]
    assert names == ["gpustasis-7.img", "gpustasis-memory-7.img", "gpustasis-memory-8.img"]
    assert all((chain[1] / name).is_file() for name in names)


def test_the_plain_readers_read_the_same(chain: tuple[Path, Path]) -> None:
    one, two = chain
    plain = parse_manifest((two / MANIFEST_NAME).read_bytes())
    assert [(task.pid, task.kind) for task in plain.tasks] == [(7, 0), (7, 1), (8, 1)]

    def read_source(source: PlainSource) -> bytes:
        assert source.depth == 1
        return (one / source.name).read_bytes()

    sources = set()
    for task in read_manifest(two).tasks:
        path = two / task.image_name
        image, other = ImageReader.open(path), PlainImage(path.read_bytes(), read_source)
        image.attach_sources()
        assert other.kind == image.info.kind.value == task.kind.value
        found = [(s.depth, s.pid, s.kind.value, s.image_name) for s in image.info.sources]
        assert found == [(s.depth, s.pid, s.kind, s.name) for s in other.sources]
        sources |= {(task.kind, source.kind) for source in image.info.sources}
        other.verify()
        for index in range(len(image)):
            assert image.read_chunk(index) == other.read_chunk(index)
    assert sources == {(mine, theirs) for mine in KINDS for theirs in KINDS}


def test_the_readers_refuse_the_same(chain: tuple[Path, Path]) -> None:
    """A kind without its feature, a feature without its kind, and whatever else one byte makes."""
    generator = random.Random(6)
    manifest, image = chain[1] / MANIFEST_NAME, chain[1] / image_name(7, CPU)
    whole, header = manifest.read_bytes(), image.read_bytes()
    verdicts = set()
    for trial in range(600):
        file = bytearray(whole)
        at = 16 if trial == 0 else generator.randrange(len(file) - 16)
        file[at] = generator.choice([0, 1, 2, 8, 9, 255])
        file[-16:] = xxhash.xxh3_128_digest(file[:-16])
        manifest.write_bytes(file)
        core = verdict(lambda: read_manifest(chain[1]))
        assert core == verdict(lambda now=bytes(file): parse_manifest(now)), at
        verdicts.add(core)
    manifest.write_bytes(whole)
    for at, value in ((16, 1), (16, 9 + 16), (76, 0), (76, 2), (77, 1)):
        file = bytearray(header)
        file[at] = value
        file[240:256] = xxhash.xxh3_128_digest(file[:240])
        file[-64:-48] = file[240:256]
        file[-16:] = xxhash.xxh3_128_digest(file[-128:-16])
        image.write_bytes(file)
        core = verdict(lambda: ImageReader.open(image))
        assert core == verdict(lambda now=bytes(file): PlainImage(now)), (at, value)
        verdicts.add(core)
    assert verdicts == {"whole", "corrupt", "unsupported"}


def verdict(read: object) -> str:
    try:
        read()  # type: ignore[operator]
    except (CorruptDataError, ImageError):
        return "corrupt"
    except (UnsupportedDataError, UnsupportedError):
        return "unsupported"
    return "whole"


@pytest.mark.parametrize("packed", [False, True], ids=["directory", "archive"])
def test_verify_and_flatten(tmp_path: Path, chain: tuple[Path, Path], packed: bool) -> None:
    one, two = chain
    parents: list[str | Path] = []
    if packed:
        parents = ["--parent", pack(one, tmp_path / "one.tar")]
        two = pack(two, tmp_path / "two.tar.gz", compression="gzip")
    verified = run("verify", two, *parents)
    assert verified.exit_code == 0, verified.output
    assert "3 images" in verified.output
    flat = tmp_path / "flat"
    result = run("flatten", two, "-o", flat, *parents)
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert places(flat) == places(chain[1])
    for kind in KINDS:
        assert contents(flat, kind) == contents(chain[1], kind)
    assert run("verify", flat).exit_code == 0


@pytest.mark.parametrize("packed", [False, True], ids=["directory", "archive"])
def test_verify_says_which_memory_is_whole(
    tmp_path: Path, chain: tuple[Path, Path], packed: bool
) -> None:
    def verified(checkpoint: Path) -> tuple[str, int, int]:
        place = pack(checkpoint, tmp_path / f"{checkpoint.name}.tar") if packed else checkpoint
        found = json.loads(run("verify", "--json", place).stdout)
        said = run("verify", place).output
        return said.partition(" whole, ")[2].strip(), found["plain_bytes"], found["cpu_bytes"]

    gpu, cpu = (sum(map(len, contents(chain[0], kind).values())) for kind in KINDS)
    said = f"{mib(gpu)} of GPU memory and {mib(cpu)} of CPU memory"
    assert verified(chain[0]) == (said, gpu + cpu, cpu)
    for name, images, memory in (
        ("GPU", {7: memory_of(["A"] * 300)}, {}),
        ("CPU", {}, {7: memory_of(["A"] * 300)}),
    ):
        make_link(tmp_path / name, images, cpu_memory=memory)
        size = 300 * PAGE
        said = f"{mib(size)} of {name} memory"
        assert verified(tmp_path / name) == (said, size, size if name == "CPU" else 0)


def test_what_a_restore_needs_is_of_gpu_memory_alone(chain: tuple[Path, Path]) -> None:
    """The sizes on GPUs of a process are those of its GPU memory's entry, not of the other."""
    manifest = read_manifest(chain[0])
    use = [TaskGpu(0, 9 << 20)]
    tasks = [
        ManifestTask(
            pid=task.pid,
            externalized=True,
            digest=task.digest,
            gpu_source=GpuSource.NVML if task.kind == MemoryKind.GPU else GpuSource.UNKNOWN,
            gpus=use if task.kind == MemoryKind.GPU else [],
            kind=task.kind,
        )
        for task in manifest.tasks
    ]
    write_manifest(
        chain[0],
        Manifest(
            checkpoint_id=manifest.checkpoint_id,
            driver_api_version=13000,
            gpus=manifest.gpus,
            tasks=tasks,
        ),
    )
    found = json.loads(run("inspect", "--requirements", "--json", chain[0]).stdout)["requirements"]
    assert found["unplaced_bytes"] == 0
    assert [gpu["memory_bytes"] for gpu in found["gpus"]] == [9 << 20]


def test_of_cpu_memory_alone_no_driver_is_shown(tmp_path: Path, chain: tuple[Path, Path]) -> None:
    alone = tmp_path / "alone"
    make_link(alone, {}, cpu_memory={8: memory_of(["A"] * 300)})
    statistics = {"version": 1, "result": "ok", "error": "", "backend": "", "tasks": []}
    (alone / "gpustasis-dump.json").write_text(json.dumps(statistics | {"phases_ms": {}}))
    found = json.loads(run("inspect", "--json", alone).stdout)
    assert found["backend"] is None and found["driver_version"] == ""
    shown = run("inspect", alone).output
    assert re.search(rf"CPU memory +│ {mib(300 * PAGE)} in ", shown), shown
    for absent in ("Driver", "Backend", "GPU"):
        assert absent not in shown
    needed = run("inspect", "--requirements", alone).output
    assert "Driver" not in needed and found["checkpoint_id"] in needed
    both = run("inspect", chain[0]).output
    assert all(re.search(f"{row} +│ [0-9]", both) for row in ("Driver", "GPU memory", "CPU memory"))


def test_memory_is_not_called_the_gpu_s_where_it_is_both(
    tmp_path: Path, chain: tuple[Path, Path]
) -> None:
    one, two = chain
    flat = run("flatten", two, "-o", tmp_path / "flat").output
    assert "of memory were in earlier checkpoints" in flat and "GPU" not in flat
    assert "task 7, GPU memory" in run("diff", one, two).output
    assert "task 7, CPU memory" in run("diff", one, two).output
    heads = run("list", tmp_path).output.splitlines()[0].split()
    assert heads[4:7] == ["TASKS", "MEMORY", "STORED"]


@pytest.mark.parametrize("packed", [False, True], ids=["directory", "archive"])
def test_damage_is_found(tmp_path: Path, chain: tuple[Path, Path], packed: bool) -> None:
    path = chain[0] / image_name(8, CPU)
    chunk = ImageReader.open(path).chunk(0)
    raw = bytearray(path.read_bytes())
    raw[chunk.offset] ^= 1
    path.write_bytes(raw)
    place = pack(chain[0], tmp_path / "one.tar") if packed else chain[0]
    found = run("verify", place)
    assert found.exit_code != 0 and path.name in found.output, found.output


def test_an_image_under_the_name_of_the_other_kind_is_refused(chain: tuple[Path, Path]) -> None:
    gpu, cpu = chain[0] / image_name(7), chain[0] / image_name(7, CPU)
    gpu.rename(cpu)
    assert "is an image of GPU memory" in run("verify", chain[0]).output


def test_diff_and_inspect(chain: tuple[Path, Path]) -> None:
    found = json.loads(run("diff", "--json", *chain).stdout)
    assert [(task["pid"], task["memory"]) for task in found["tasks"]] == [
        (7, "gpu"),
        (7, "cpu"),
        (8, "cpu"),
    ]
    assert "task 8, CPU memory" in run("diff", *chain).output
    shown = json.loads(run("inspect", "--json", chain[1]).stdout)
    views = {process["pid"]: process for process in shown["processes"]}
    assert views[7]["cuda"] and views[7]["cpu_memory"] and not views[8]["cuda"]
    assert views[8]["cpu_memory"]["file"] == image_name(8, CPU)
    assert shown["cpu_image_bytes"] == sum(
        (chain[1] / image_name(pid, CPU)).stat().st_size for pid in (7, 8)
    )
    assert image_name(8, CPU) in run("inspect", chain[1]).output


def test_a_store_counts_it_and_finds_what_is_missing(
    tmp_path: Path, chain: tuple[Path, Path]
) -> None:
    def listed() -> dict[str, dict[str, object]]:
        found = json.loads(run("list", "--json", tmp_path).stdout)
        return {entry["name"]: entry for entry in found["entries"]}

    assert listed()["two"]["tasks"] == 2
    assert run("verify", tmp_path).exit_code == 0
    (chain[0] / image_name(8, CPU)).unlink()
    assert "gpustasis-memory-8.img" in json.dumps(listed()["two"])
    assert run("verify", tmp_path).exit_code != 0
