# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on top of each other, made without a dump, and what must hold of them."""

from __future__ import annotations

import os
from pathlib import Path

from gpustasis._core import (
    MANIFEST_NAME,
    ImageInfo,
    ImageReader,
    Manifest,
    ManifestTask,
    MemoryKind,
    ParentIndex,
    Region,
    image_name,
    link_parent,
    read_manifest,
    write_image,
    write_manifest,
)
from gpustasis.image.verification import verify_directory
from support.image_samples import BOOT_ID, GPU, PAGE, Memory, noise
from support.inventory import write_inventory

BASE = 0x7F0000000000


def checkpoint_id(name: str) -> bytes:
    return noise(16, f"id of {name}")


def memory_of(pages: list[str], base: int = BASE) -> Memory:
    """One region with a page for each word: "0" is zero, all others are bytes of their own; those
    that begin with a small letter compress."""
    return [(base, b"".join(page_of(word) for word in pages))]


def page_of(word: str) -> bytes:
    if word == "0":
        return bytes(PAGE)
    if word[:1].islower():
        return noise(PAGE // 16, word) * 16
    return noise(PAGE, word)


def make_link(
    directory: Path,
    images: dict[int, Memory],
    *,
    cpu_memory: dict[int, Memory] | None = None,
    parent: Path | None = None,
    taken: float | None = None,
    chunk_size: int = PAGE,
    finished: bool = True,
    alike: bool = False,
) -> Manifest:
    """Make `directory` a checkpoint with these images, on top of `parent` if there is one.

    Its id follows from its name. taken: the manifest's time. finished: it has an inventory, as
    CRIU writes it at the end. alike: its images refer to each other, as those of a dump do.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    index = ParentIndex(chunk_size) if parent is None else ParentIndex.read(parent)
    below = None if parent is None else index.manifest
    if parent is not None:
        link_parent(directory, parent)
    tasks = []
    places = [(pid, MemoryKind.GPU, memory) for pid, memory in images.items()]
    places += [(pid, MemoryKind.CPU, memory) for pid, memory in (cpu_memory or {}).items()]
    for pid, kind, memory in sorted(places, key=lambda place: (place[0], place[1].value)):
        info = ImageInfo(
            pid=pid,
            kind=kind,
            checkpoint_id=checkpoint_id(directory.name),
            boot_id=BOOT_ID,
            comm="train",
            gpus=[GPU] if kind == MemoryKind.GPU else [],
            chunk_size=chunk_size,
            regions=[Region(address, len(content)) for address, content in memory],
        )
        written = write_image(
            directory / image_name(pid, kind),
            info,
            memory,
            alignment=64,
            threads=1,
            parent=index,
        )
        tasks.append(ManifestTask(pid=pid, externalized=True, digest=written.digest, kind=kind))
        if alike:
            index.add(directory, info.checkpoint_id, tasks[-1])
    manifest = Manifest(
        checkpoint_id=checkpoint_id(directory.name),
        driver_api_version=13000 if images else 0,
        driver_version="580.95.05" if images else "",
        gpus=[GPU] if images else [],
        tasks=tasks,
        parent_id=bytes(16) if below is None else below.checkpoint_id,
        chain_length=0 if below is None else below.chain_length + 1,
    )
    write_manifest(directory, manifest)
    if taken is not None:
        os.utime(directory / MANIFEST_NAME, (taken, taken))
    if finished:
        name = f"checkpoint-{manifest.checkpoint_id.hex()}"
        write_inventory(directory, name, mark=f"inventory of {directory.name}")
    return manifest


def contents(directory: Path, kind: MemoryKind = MemoryKind.GPU) -> dict[int, bytes]:
    """All memory of that kind in a checkpoint by pid, read through its chain."""
    found = {}
    for task in read_manifest(directory).tasks:
        if task.kind != kind:
            continue
        image = ImageReader.open(directory / task.image_name)
        image.attach_sources()
        found[task.pid] = b"".join(image.read_chunk(index) for index in range(len(image)))
    return found


def is_whole(directory: Path) -> bool:
    return not verify_directory(directory, threads=1).problems


def make_chain(store: Path, length: int, *, pages: int = 8) -> list[Path]:
    """A full checkpoint and `length` on top of it, a page changed in each: c000, c001, ..."""
    words = [f"a{page}" if page % 2 else f"A{page}" for page in range(pages)]
    made: list[Path] = []
    for number in range(length + 1):
        if number:
            words[number % pages] = f"B{number}"
        directory = store / f"c{number:03}"
        parent = made[-1] if made else None
        make_link(
            directory,
            {7: memory_of(words)},
            parent=parent,
            taken=1_800_000_000 + number,
        )
        made.append(directory)
    return made
