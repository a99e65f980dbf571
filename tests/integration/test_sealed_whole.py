# SPDX-License-Identifier: Apache-2.0
"""recipients alone: all of a checkpoint is sealed while it is made, CRIU's images too."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from campaigns.rig import Rig, small_filesystem
from campaigns.steady_job import SteadyJob
from gpustasis.criu.plugin import Scalar
from support.certificates import Pair
from support.cpu_memory import OURS, running
from support.live_sealing import gpustasis, needles, opened_by, ours

EARLY = ("inventory.img", "pstree.img")  # CRIU reads them before it asks a plugin, and ids-*
MIB = 1 << 20


def sealed_for(pair: Pair, **more: Scalar) -> dict[str, Scalar]:
    return {"recipients": [str(pair.certificate)], **more}


def is_early(name: str) -> bool:
    return name in EARLY or name.startswith("ids-")


def require_sealed(images: Path, wanted: list[bytes]) -> None:
    """Nothing of a checkpoint is there that is not sealed, but for what CRIU reads early."""
    assert wanted
    for path in images.iterdir():
        if path.is_symlink():  # to a parent
            continue
        is_sealed = path.name.startswith("gpustasis-sealed")
        assert is_sealed or is_early(path.name) or path.suffix != ".img", path.name
        content = path.read_bytes()
        assert not any(needle in content for needle in wanted), path.name


@pytest.mark.parametrize("cpu_memory", ["criu", "ours"])
def test_there_and_back(rig: Rig, me: Pair, cpu_memory: str) -> None:
    with rig.job(mib=16, children=1) as job:
        images = rig.images()
        # The job has a copy of its GPU memory, which is CPU memory.
        dumped = rig.dump(job, images, config=sealed_for(me, cpu_memory=cpu_memory))
        assert dumped.status == 0, dumped.errors
        assert job.wait() == -signal.SIGKILL
        steps = job.steps()
        rig.settle(images)
        names = {name for name in ours(images) if not name.startswith("gpustasis-sealed")}
        assert not names
        require_sealed(images, needles(images, me))
        restored = rig.restore(images, config=opened_by(me))
        assert restored.status == 0, restored.errors
        job.run_on()
        assert job.steps() > steps


def test_a_tree_without_gpus(rig: Rig, memory_job: Path, me: Pair) -> None:
    """There is no image of ours, and all of it is sealed."""
    with running(rig, memory_job, mib=40, children=1, criu_restores=True) as job:
        images = rig.images()
        needle = Path(f"/proc/{job.pid}/environ").read_bytes()[:64]
        dumped = rig.dump(job, images, config=sealed_for(me))
        assert dumped.status == 0, dumped.errors
        job.wait()
        assert ours(images) == {"gpustasis-sealed.cms", "gpustasis-sealed.img"}
        require_sealed(images, [needle])
        restored = rig.restore(images, config=opened_by(me))
        assert restored.status == 0, restored.errors
        job.run_on()


def test_a_job_that_is_left_running(rig: Rig, me: Pair) -> None:
    with rig.job(mib=8) as job:
        images = rig.images()
        dumped = rig.dump(job, images, "--leave-running", config=sealed_for(me, **OURS))
        assert dumped.status == 0, dumped.errors
        job.run_on()
        job.end()
        assert rig.restore(images, config=opened_by(me)).status == 0
        job.run_on()


def test_unsealed_it_is_as_criu_wrote_it(newest_rig: Rig, me: Pair, tmp_path: Path) -> None:
    rig = newest_rig
    with rig.job(mib=8) as job:
        images = rig.images()
        assert rig.dump(job, images, config=sealed_for(me)).status == 0
        job.wait()
        opened = tmp_path / "opened"
        done = gpustasis(rig, "unseal", images, "--key", me.key, "-o", opened)
        assert done.returncode == 0, done.stderr
        assert (opened / "gpustasis-manifest.img").exists() and (opened / "pstree.img").exists()
        assert gpustasis(rig, "verify", opened).returncode == 0
        assert rig.restore(opened).status == 0
        job.run_on()


def test_what_was_changed_is_refused_before_anything_is_made(rig: Rig, me: Pair) -> None:
    with rig.job(mib=4) as job:
        other, images = rig.images(), rig.images()
        assert rig.dump(job, other, "--leave-running", config=sealed_for(me)).status == 0
        assert rig.dump(job, images, config=sealed_for(me)).status == 0
        job.wait()
        rig.settle(images)
        output = job.log.read_bytes()

        def refusal(change: Callable[[Path], object], **config: Scalar) -> str:
            copy = rig.copy(images)
            change(copy)
            restored = rig.restore(copy, config=config or opened_by(me))
            assert restored.status != 0
            assert not job.alive_pids() and job.log.read_bytes() == output
            assert "Forking task" not in restored.log
            return restored.errors

        def nothing(_: Path) -> None:
            pass

        assert "names no private_key" in refusal(nothing, layout="criu")
        for name in sorted(ours(images)):
            lost = f"{name}: open: No such file or directory"
            assert lost in refusal(lambda copy, name=name: (copy / name).unlink())
            replaced = refusal(lambda copy, name=name: shutil.copy(other / name, copy / name))
            assert "the key is that of another sealed checkpoint" in replaced
        # CRIU's images are in the last frames of the file with the manifest.
        sealed = images / "gpustasis-sealed.img"
        for at in (200, sealed.stat().st_size // 2, sealed.stat().st_size - 500):
            assert sealed.name in refusal(lambda copy, at=at: flip_byte(copy / sealed.name, at))
        said = "is not the one that was packed with the others"
        ids = f"ids-{job.pid}.img"
        assert said in refusal(lambda copy: shutil.copy(copy / ids, copy / "ids-77.img"))
        last = (images / ids).stat().st_size - 1  # of a number: CRIU itself finds nothing wrong
        assert said in refusal(lambda copy: flip_byte(copy / ids, last))
        assert rig.restore(images, config=opened_by(me)).status == 0
        job.run_on()


def flip_byte(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def require_unharmed(rig: Rig, job: SteadyJob, images: Path) -> None:
    """What a dump that failed leaves: the job, and no checkpoint."""
    rig.settle(images)
    job.run_on()
    assert not (images / "inventory.img").exists()
    assert not (images / "gpustasis-sealed.img").exists()


def test_a_disk_that_is_full_costs_the_job_nothing(rig: Rig, memory_job: Path, me: Pair) -> None:
    with running(rig, memory_job, mib=40, criu_restores=True) as job:
        with small_filesystem(rig.scratch / "full", MIB, 0) as images:
            dumped = rig.dump(job, images, config=sealed_for(me))
            assert dumped.status == 1
            assert "No space left on device" in dumped.errors, dumped.errors
            assert "Error flushing image" in dumped.log  # so criu itself fails, and cleans up
            require_unharmed(rig, job, images)
        images = rig.images()
        assert rig.dump(job, images, config=sealed_for(me)).status == 0
        job.wait()
        assert rig.restore(images, config=opened_by(me)).status == 0
        job.run_on()


def test_gpus_come_back_out_of_sealed_images_when_the_last_file_fails(rig: Rig, me: Pair) -> None:
    with rig.job(mib=8, children=1) as job:
        for files in range(3, 14):
            with small_filesystem(rig.scratch / f"{files}-files", 1 << 28, files) as images:
                dumped = rig.dump(job, images, config=sealed_for(me))
                assert dumped.status == 1
                require_unharmed(rig, job, images)
                if "gpustasis-sealed.img: " in dumped.errors:
                    break
        assert "gpustasis-sealed.img: " in dumped.errors
        assert "brought back" in dumped.log
        images = rig.images()
        assert rig.dump(job, images, config=sealed_for(me)).status == 0
        job.wait()
        assert rig.restore(images, config=opened_by(me)).status == 0
        job.run_on()


def test_by_the_commands(newest_rig: Rig, me: Pair, tmp_path: Path) -> None:
    """What a person does: --to, then --key."""
    rig = newest_rig
    with rig.job(mib=8) as job:
        images = tmp_path / "images"
        criu = ("--criu", rig.criu.root or rig.criu.program)
        words = ("checkpoint", *criu, job.pid, "-D", images)
        refused = gpustasis(rig, *words, "--to", tmp_path / "nobody.pem")
        assert refused.returncode == 12 and "nobody.pem" in refused.stderr
        job.run_on()
        shutil.rmtree(images)
        done = gpustasis(rig, *words, "--to", me.certificate)
        assert done.returncode == 0, done.stderr
        job.wait()
        require_sealed(images, needles(images, me))
        without = gpustasis(rig, "restore", *criu, "-D", images)
        assert without.returncode == 12 and "private_key" in without.stderr
        restored = gpustasis(rig, "restore", *criu, "-D", images, "--key", me.key)
        assert restored.returncode == 0, restored.stderr
        job.run_on()


def test_unsealing_makes_nobodys_program_run_as_root(
    newest_rig: Rig, me: Pair, tmp_path: Path
) -> None:
    rig = newest_rig
    with rig.job(mib=4) as job:
        images = rig.images()
        config = sealed_for(me, risk=["clear-images"])
        assert rig.dump(job, images, "--leave-running", config=config).status == 0
    (images / "tool").write_bytes(b"#!/bin/sh\n")
    os.chown(images / "tool", 65534, 65534)
    (images / "tool").chmod(0o6755)
    done = gpustasis(rig, "unseal", images, "--key", me.key, "-o", tmp_path / "opened")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "opened/tool").stat().st_mode & 0o7777 == 0o755
    (images / "away").symlink_to("/nowhere")
    done = gpustasis(rig, "unseal", images, "--key", me.key, "-o", tmp_path / "again")
    assert done.returncode == 14 and "is no ordinary file" in done.stderr
    assert not (tmp_path / "again").exists()


def test_nothing_in_the_clear_lies_beside_it(newest_rig: Rig, me: Pair) -> None:
    """Of an earlier dump, into the same directory; and that one stays what it is."""
    for config in ({}, {"layout": "packed"}):
        with newest_rig.job(mib=4) as job:
            images = newest_rig.images()
            first = newest_rig.dump(job, images, "--leave-running", config=config)
            assert first.status == 0, first.errors
            steps = job.steps()
            dumped = newest_rig.dump(job, images, config=sealed_for(me))
            assert dumped.status == 1
            assert "of an earlier checkpoint, in the clear: use another directory" in dumped.errors
            job.run_on()
            assert job.steps() > steps
            job.end()
            restored = newest_rig.restore(images)
            assert restored.status == 0, restored.errors
            job.run_on()


def test_a_sealed_checkpoint_takes_the_place_of_another(newest_rig: Rig, me: Pair) -> None:
    with newest_rig.job(mib=4) as job:
        images = newest_rig.images()
        for extra in (["--leave-running"], []):
            dumped = newest_rig.dump(job, images, *extra, config=sealed_for(me))
            assert dumped.status == 0, dumped.errors
        job.wait()
        assert newest_rig.restore(images, config=opened_by(me)).status == 0
        job.run_on()
