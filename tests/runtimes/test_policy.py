# SPDX-License-Identifier: Apache-2.0
"""Annotations of Podman's containers, with runc and with crun: the hook really runs, the plugin
finds what it left, and chains hold whatever Podman does with image directories."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gpustasis._core import ENVELOPE_NAME, PARENT_LINK, MemoryKind, ancestors_of, image_name
from gpustasis.archive.layout import CHECKPOINT
from gpustasis.archive.opened import open_archive
from gpustasis.policy import POLICY_DIRECTORY, STORE_DIRECTORY
from support.engine_gpu import Steady, SteadyContainer, write_config
from support.engine_image import IMAGE
from support.engine_policy import add_hook
from support.engine_root import EngineRoot
from support.recipients import make_recipient

RUNTIMES = ["runc", "crun"]


@pytest.fixture(autouse=True)
def hook(engines: EngineRoot, elsewhere: EngineRoot) -> None:
    add_hook(engines)
    add_hook(elsewhere)


def annotations(**words: str) -> list[str]:
    return [
        word
        for name, text in words.items()
        for word in ("--annotation", f"io.gpustasis.{name}={text}")
    ]


def policy(container: SteadyContainer) -> Path:
    return container.root.path(f"{POLICY_DIRECTORY}/{container.id()}.toml")


def store(container: SteadyContainer) -> Path:
    return container.root.path(f"{STORE_DIRECTORY}/{container.id()}")


def dumped(container: SteadyContainer) -> dict[str, Any]:
    """The plugin's account of the last dump, which is still in Podman's storage."""
    path = container.root.path(container.images()) / "gpustasis-dump.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def checkpoint(container: SteadyContainer, *words: str) -> None:
    container.root.run("podman", "container", "checkpoint", *words, container.name)


def policies(engines: EngineRoot) -> set[str]:
    return {file.name for file in engines.path("/run").glob("gpustasis/policy/*.toml")}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_wrong_annotation_stops_the_start(engines: EngineRoot, runtime: str) -> None:
    name = f"wrong-{runtime}"
    before = policies(engines)  # of containers that were checkpointed and never started again
    done = engines.run(
        *["podman", "--runtime", runtime, "run", "--name", name, "--network", "none"],
        *[*annotations(threads="many"), IMAGE, "/bin/sh", "-c", "echo it runs"],
        check=False,
    )
    try:
        assert done.returncode != 0
        assert done.stdout == ""
        sentence = 'annotation io.gpustasis.threads = "many": must be a number from 0 to 1024'
        refusal = engines.path(f"{POLICY_DIRECTORY}/{SteadyContainer(engines, name).id()}.refused")
        assert refusal.read_text() == sentence + "\n"
        assert sentence in done.stderr
        assert policies(engines) == before
    finally:
        engines.run("podman", "rm", "--force", "--ignore", name)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_chain_across_stops_and_hosts(
    engines: EngineRoot, steady: Steady, elsewhere: EngineRoot, runtime: str
) -> None:
    write_config(engines, "chunk_size = 4096")  # more of them stay the same
    container = steady(
        f"chain-{runtime}", runtime, *annotations(incremental="true", keep="9", threads="1"), mib=16
    )
    assert policy(container).is_file()
    checkpoint(container, "--leave-running")
    assert dumped(container)["full_because"].startswith("no checkpoint in ")
    container.run_on()

    # Podman empties the image directory at each checkpoint; crun's restore runs no hook.
    for length in (1, 2):
        checkpoint(container)
        found = dumped(container)
        assert found["config"].endswith(f", {POLICY_DIRECTORY}/{container.id()}.toml")
        assert (found["threads"], found["parent"]["chain_length"]) == (1, length)
        assert found["tasks"][0]["ref"]["chunks"] > 0
        assert policy(container).is_file()
        container.root.run("podman", "container", "restore", container.name)
        container.run_on()

    checkpoint(container, "--export", archive := f"/mnt/shared/{container.name}.tar")
    with open_archive(engines.path(archive)) as opened:  # CRI-O takes none that leads out by ".."
        link = opened.members[CHECKPOINT + PARENT_LINK].target
        assert Path(link).is_relative_to(STORE_DIRECTORY)
    write_config(engines)
    assert_restores_with_its_chain_only(container, elsewhere, runtime)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_cpu_memory_is_stored_and_built_upon(steady: Steady, runtime: str) -> None:
    """As its annotation asks, whatever the host's configuration says; in the container's store."""
    words = {"incremental": "true", "cpu-memory": "ours"}
    container = steady(f"cpu-{runtime}", runtime, *annotations(**words), mib=16)
    checkpoint(container, "--leave-running")
    assert dumped(container)["cpu_memory"][0]["left_because"] == ""
    container.run_on()
    checkpoint(container)
    found = dumped(container)
    (task,) = found["cpu_memory"]
    assert found["parent"]["chain_length"] == 1
    assert task["ref"]["plain_bytes"] > 0 and task["stored_twice_bytes"] == 0
    name = image_name(task["image_pid"], MemoryKind.CPU)
    kept = [path for path in store(container).iterdir() if is_checkpoint(path)]
    assert len(kept) == 2 and all((path / name).is_file() for path in kept)
    container.root.run("podman", "container", "restore", container.name)
    container.run_on()


def is_checkpoint(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def order(path: Path) -> int:
    return (path / "gpustasis-manifest.img").stat().st_mtime_ns


def assert_restores_with_its_chain_only(
    container: SteadyContainer, elsewhere: EngineRoot, runtime: str
) -> None:
    by_age = sorted((path for path in store(container).iterdir() if is_checkpoint(path)), key=order)
    assert len(by_age) == 4
    name = f"moved-{container.name}"
    words = ["podman", "--runtime", runtime, "container", "restore", "--name", name]
    words += ["--import", f"/mnt/shared/{container.name}.tar"]
    moved = SteadyContainer(elsewhere, name)
    try:
        failed = elsewhere.run(*words, check=False)
        assert failed.returncode != 0
        text = failed.stderr + "".join(logs(elsewhere))
        assert f"checkpoint {by_age[-2].name}, is not in" in text
        moved.remove()
        there = elsewhere.path("/var/lib/gpustasis/checkpoints")
        for path in by_age[:-1]:
            shutil.copytree(path, there / path.name, symlinks=True)
        elsewhere.run(*words)
        moved.run_on()
    finally:
        moved.remove()
        shutil.rmtree(elsewhere.path("/var/lib/gpustasis"), ignore_errors=True)


def logs(root: EngineRoot) -> list[str]:
    """What CRIU's restores have said, where Podman leaves it."""
    storage = root.path("/var/lib/containers/storage/overlay-containers")
    return [path.read_text(errors="replace") for path in storage.glob("*/userdata/restore.log")]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_policy_goes_with_the_container(steady: Steady, runtime: str) -> None:
    container = steady(f"gone-{runtime}", runtime, *annotations(compress="none"), mib=2)
    found = policy(container)
    assert found.is_file()
    container.root.run("podman", "stop", "--time", "0", container.name)
    assert not found.exists()
    assert not store(container).exists()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_keep_of_a_sealed_chain(
    engines: EngineRoot, steady: Steady, tmp_path: Path, runtime: str
) -> None:
    """With max_chain = 1 the third of four is a full one, and the fourth is built on it; of these
    four the newest stays, and what it needs. The hook that removes the others has no key."""
    pair = make_recipient(tmp_path)
    engines.write("/etc/gpustasis/mine.pem", pair.certificate.read_text())
    engines.write("/etc/gpustasis/mine.key", pair.key.read_text(), 0o600)
    sealing = (
        'recipients = ["/etc/gpustasis/mine.pem"]',
        'private_key = "/etc/gpustasis/mine.key"',
    )
    write_config(engines, "max_chain = 1", *sealing)
    try:
        asked = annotations(incremental="true", keep="1")
        container = steady(f"sealed-{runtime}", runtime, *asked, mib=8)
        for _ in range(3):
            checkpoint(container, "--leave-running")
            container.run_on()
        before = {path for path in store(container).iterdir() if is_checkpoint(path)}
        assert len(before) == 3
        checkpoint(container)
        kept = {path for path in store(container).iterdir() if is_checkpoint(path)}
        assert len(kept) == 2 and len(kept & before) == 1
        counts = [ancestors_of((path / ENVELOPE_NAME).read_bytes()) for path in kept]
        assert sorted(counts) == [0, 1]
        engines.run("podman", "container", "restore", container.name)
        container.run_on()
    finally:
        write_config(engines)
