# SPDX-License-Identifier: Apache-2.0
"""layout = "packed", as the commands make, show, check, copy, unpack, seal, send and restore it,
with real CRIU."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from campaigns.rig import Rig
from campaigns.steady_job import SteadyJob
from gpustasis._core import PACK_NAME, PackReader, read_manifest
from gpustasis.criu.images import INVENTORY_NAME
from support.cpu_memory import running
from support.json_output import check_document
from support.recipients import make_recipient

Gpustasis = Callable[..., CompletedProcess[str]]
Run = Callable[..., str]


@pytest.fixture
def run(gpustasis: Gpustasis) -> Run:
    def run(command: str, *words: str | Path) -> str:
        done = gpustasis(*command.split(), *words)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    return run


@pytest.fixture
def job(rig: Rig, memory_job: Path) -> Iterator[SteadyJob]:
    with running(rig, memory_job, mib=8, children=1, criu_restores=True) as job:
        yield job


@pytest.mark.one_criu
def test_a_job_s_life(rig: Rig, run: Run, job: SteadyJob, tmp_path: Path) -> None:
    program = ("--criu", str(rig.criu.root or rig.criu.program))
    store = tmp_path / "store"
    one, two, flat = store / "one", store / "two", tmp_path / "flat"
    words = (str(job.pid), *program, "--layout", "packed", "--cpu-memory", "ours", "-D")
    check_document(run("checkpoint --json", *words, one, "-R"), "checkpoint")
    run("checkpoint", *words, two, "--parent", one)
    job.wait()
    assert read_manifest(one).pack == PackReader.open(one).digest

    shown = check_document(run("inspect --json", two), "inspect")
    assert shown["layout"] == "packed"
    assert {each["comm"] for each in shown["processes"]} == {"memory_job"}
    assert "packed into one file" in run("inspect", two)
    checked = check_document(run("verify --json", two), "verify")
    assert checked["packed_files"] == len(PackReader.open(two).files) > 10
    assert checked["packed_bytes"] > 0 and checked["images"] == len(job.pids)
    assert "of CRIU's images whole" in run("verify", one)
    listed = check_document(run("list --json", store), "list")["entries"]
    assert [each["complete"] for each in listed] == [True, True]
    check_document(run("prune --json", store, "--keep-last", "1", "--dry-run"), "prune")
    assert run("diff", one, two)

    run("flatten", two, "-o", flat)
    assert read_manifest(flat).pack == read_manifest(two).pack
    me = make_recipient(tmp_path)
    sealed, opened = tmp_path / "sealed", tmp_path / "opened"
    run("seal", flat, "--to", me.certificate, "-o", sealed)
    assert not (sealed / PACK_NAME).exists()
    run("unseal", sealed, "--key", me.key, "-o", opened)
    run("verify", opened)
    run("restore", "-D", opened, *program)
    job.run_on()


def test_unpacked_it_is_as_criu_wrote_it(
    rig: Rig, run: Run, job: SteadyJob, tmp_path: Path
) -> None:
    images, plain = rig.images(), tmp_path / "plain"
    assert rig.dump(job, images, config={"layout": "packed"}).status == 0
    job.wait()
    check_document(run("flatten --json", images, "-o", plain, "--layout", "criu"), "flatten")
    assert read_manifest(plain).pack is None and not (plain / PACK_NAME).exists()
    packed = PackReader.open(images)
    for file in packed.files:
        found = plain / file.name
        assert found.stat().st_size == file.size
        assert found.stat().st_mode & 0o777 == file.mode
        if file.size < 1 << 20:
            assert found.read_bytes() == packed.read(file.name)
    run("verify", plain)
    assert check_document(run("inspect --json", plain), "inspect")["layout"] == "criu"
    assert rig.restore(plain).status == 0
    job.run_on()


def flip(directory: Path) -> None:
    with (directory / PACK_NAME).open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 1]))


def test_no_command_takes_a_pack_for_whole_that_is_not(
    newest_rig: Rig, gpustasis: Gpustasis, memory_job: Path, tmp_path: Path
) -> None:
    """Neither that of a store, nor one that makes copies of it."""
    store = tmp_path / "store"
    with running(newest_rig, memory_job, mib=8, criu_restores=True) as job:
        for name in ("damaged", "good", "lost"):
            images = newest_rig.images()
            assert newest_rig.dump(job, images, "-R", config={"layout": "packed"}).status == 0
            shutil.copytree(images, store / name)
    assert gpustasis("verify", store).returncode == 0
    flip(store / "damaged")
    (store / "lost" / PACK_NAME).unlink()
    listed = gpustasis("list", store).stdout
    (lost,) = [line for line in listed.splitlines() if line.split()[:1] == ["lost"]]
    assert f"{PACK_NAME} is missing" in lost
    checked = gpustasis("verify", store)
    assert checked.returncode == 10
    assert "damaged" in checked.stderr.splitlines()[-1]
    recipient = str(make_recipient(tmp_path, "somebody").certificate)
    for name, *words in (
        *(("damaged", "flatten"), ("lost", "flatten")),
        ("lost", "seal", "--to", recipient),
    ):
        out = tmp_path / f"{name}-{words[0]}"
        copied = gpustasis(words[0], store / name, *words[1:], "-o", out)
        assert copied.returncode in (10, 14), copied
        assert PACK_NAME in copied.stderr and not out.exists()
    kept = gpustasis("prune", store, "--keep-last", 1)
    assert kept.returncode == 0, kept.stderr
    assert (store / "good").exists() or (store / "damaged").exists()


def test_what_is_wrong_is_told(rig: Rig, gpustasis: Gpustasis, job: SteadyJob) -> None:
    images = rig.images()
    assert rig.dump(job, images, config={"layout": "packed"}).status == 0

    def told(change: Callable[[Path], object]) -> str:
        copy = rig.copy(images)
        change(copy)
        done = gpustasis("verify", copy)
        assert done.returncode == 10
        return done.stdout + done.stderr

    assert PACK_NAME in told(flip)
    assert PACK_NAME in told(lambda copy: (copy / PACK_NAME).unlink())
    assert "is not the one beside it" in told(lambda copy: (copy / "pstree.img").unlink())
    assert "is not the one beside it" in told(
        lambda copy: shutil.copy(copy / "pstree.img", copy / INVENTORY_NAME)
    )
    assert "is not the one beside it" in told(
        lambda copy: shutil.copy(copy / "pstree.img", copy / "ids-9.img")
    )


def test_a_stream_of_a_packed_checkpoint(
    rig: Rig, run: Run, job: SteadyJob, tmp_path: Path
) -> None:
    program = ("--criu", str(rig.criu.root or rig.criu.program))
    stream, place = tmp_path / "stream", tmp_path / "received"
    spool = ("--spool", str(tmp_path / "spool"))
    words = (str(job.pid), *program, "--layout", "packed", "-R", "-o")
    run("checkpoint", *words, stream, *spool)
    job.run_on()
    job.end()
    run("restore", "-i", stream, "-D", place, "--source-may-run", *program)
    assert read_manifest(place).pack is not None
    names = set(os.listdir(place))
    assert PACK_NAME in names and not any(name.startswith("core-") for name in names)
    job.run_on()
