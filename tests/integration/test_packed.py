# SPDX-License-Identifier: Apache-2.0
"""layout = "packed": CRIU's images in one file, and nothing of them anywhere else."""

from __future__ import annotations

import itertools
import shutil
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from campaigns.rig import Rig, small_filesystem
from campaigns.steady_job import SteadyJob
from gpustasis.criu.plugin import PLUGIN_NAME, Scalar, plugin_directory
from support.cpu_memory import OURS, running

PACKED: dict[str, Scalar] = {"layout": "packed"}
PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
PAGE = 4096
KILLS = 12
INVENTORY_BEGINS = "Writing image inventory"  # in criu's log
PACK = "gpustasis-files.img"
EARLY = {"inventory.img", "pstree.img"}  # CRIU reads them before it asks a plugin


def criu_images(images: Path) -> set[str]:
    """Those that lie in the open, but for those that CRIU reads first."""
    names = {path.name for path in images.glob("*.img") if not path.name.startswith("gpustasis-")}
    return {name for name in names if name not in EARLY and not name.startswith("ids-")}


def test_a_tree_with_gpus_comes_back_from_one_file(rig: Rig) -> None:
    with rig.job(mib=8, children=1) as job:
        images = rig.images()
        dumped = rig.dump(job, images, config=PACKED)
        assert dumped.status == 0, dumped.errors
        job.wait()
        assert not criu_images(images)
        assert (images / PACK).exists() and (images / "inventory.img").exists()
        restored = rig.restore(images)
        assert restored.status == 0, restored.errors
        job.run_on()


def test_a_tree_without_gpus_comes_back_from_one_file(rig: Rig, memory_job: Path) -> None:
    with running(rig, memory_job, mib=40, children=1, criu_restores=True) as job:
        images = rig.images()
        dumped = rig.dump(job, images, config=PACKED)
        assert dumped.status == 0, dumped.errors
        job.wait()
        assert not criu_images(images)
        assert not list(images.glob("gpustasis-*.img.part"))
        restored = rig.restore(images)
        assert restored.status == 0, restored.errors
        job.run_on()


def require_unharmed(rig: Rig, job: SteadyJob, images: Path) -> None:
    """What a dump that failed leaves: the job, and no checkpoint."""
    rig.settle(images)
    job.run_on()
    assert not (images / "inventory.img").exists()
    assert not (images / PACK).exists()
    assert not criu_images(images)
    rig_log = images.with_name(f"{images.name}.dump.log")
    assert "Dumping finished successfully" not in rig_log.read_text()


def test_a_disk_that_is_full_at_the_pack_costs_the_job_nothing(rig: Rig, memory_job: Path) -> None:
    with running(rig, memory_job, mib=40, criu_restores=True) as job:
        with small_filesystem(rig.scratch / "full", 1 << 20, 0) as images:
            dumped = rig.dump(job, images, config=PACKED)
            assert dumped.status == 1
            assert f'layout = "packed": {PACK}: ' in dumped.errors
            assert "No space left on device" in dumped.errors
            assert "Error flushing image" in dumped.log  # so criu itself fails, and cleans up
            assert "Dumping FAILED" in dumped.log
            require_unharmed(rig, job, images)
        images = rig.images()
        assert rig.dump(job, images, config=PACKED).status == 0
        job.wait()
        assert rig.restore(images).status == 0
        job.run_on()


def test_gpus_come_back_when_the_pack_fails(rig: Rig) -> None:
    with rig.job(mib=8, children=1) as job:
        for files in range(4, 12):
            with small_filesystem(rig.scratch / f"{files}-files", 1 << 28, files) as images:
                dumped = rig.dump(job, images, config=PACKED)
                assert dumped.status == 1  # the pack is the first to fail that could
                require_unharmed(rig, job, images)
                if 'packed": gpustasis-' in dumped.errors:
                    break
        assert 'layout = "packed": gpustasis-' in dumped.errors
        assert "brought back" in dumped.log


def test_no_step_of_the_pack_can_fail_unnoticed(rig: Rig, memory_job: Path) -> None:
    """For want of files, after the pack: at the manifest, at each image that lies in the open."""
    with running(rig, memory_job, mib=1, children=1, criu_restores=True) as job:
        failures = []
        for files in range(1, 12):
            with small_filesystem(rig.scratch / f"{files}-files", 1 << 28, files) as images:
                dumped = rig.dump(job, images, config=PACKED)
                if dumped.status == 0:
                    break
                require_unharmed(rig, job, images)
                failures += [line for line in dumped.errors.splitlines() if "cuda_plugin" in line]
        else:
            raise AssertionError("the dump never succeeds")
        job.wait()
        whole = [line for line in failures if "No space left on device" in line]
        assert len(whole) >= 4 and any("pstree.img" in line for line in whole), failures


@pytest.mark.one_criu
def test_a_dump_that_is_killed_at_the_pack_leaves_the_job_and_no_half_of_a_checkpoint(
    rig: Rig, memory_job: Path
) -> None:
    with running(rig, memory_job, mib=4, children=1, criu_restores=True) as job:
        count = rig.scratch / "calls"

        def dump(number: int) -> tuple[int, Path]:
            images = rig.images()
            words = rig.dump_words(job, images, ["--leave-running"])
            killer = [str(rig.programs.killer), str(count), str(number), "-", INVENTORY_BEGINS]
            return rig.run([*killer, *words], images, "dump", PACKED).status, images

        status, _ = dump(0)
        assert status == 0
        calls = int(count.read_text())
        whole: list[Path] = []
        halves = 0
        numbers = [*range(1, calls, max(1, calls // KILLS)), *range(calls - KILLS, calls)]
        # One dump makes a few calls more, or less, than another: there may be more such kills.
        more = (calls + number for _ in range(2) for number in range(-KILLS, KILLS))
        for tried, number in enumerate(itertools.chain(numbers, more)):
            if tried >= len(numbers) and whole and halves:
                break
            status, images = dump(number)
            assert status in (0, 137)
            rig.settle(images)
            job.run_on()
            if status == 137 and (images / "inventory.img").exists():
                whole.append(images)
            else:
                halves += status == 137
        assert whole and halves  # the last step was seen from both sides
        job.end()
        assert rig.restore(whole[-1]).status == 0
        job.run_on()


def test_an_image_that_stays_open_fails_the_dump(
    newest_rig: Rig, memory_job: Path, compile_c: Callable[..., Path]
) -> None:
    holding = compile_c(PROGRAMS / "other_plugin.c", "-shared", "-fPIC", "-DHOLDS")
    with running(newest_rig, memory_job, mib=4, criu_restores=True) as job:
        ours = plugin_directory(newest_rig.environ)
        both = newest_rig.images()
        shutil.copy(holding, both / "holding.so")
        shutil.copy(ours / PLUGIN_NAME, both)
        images = newest_rig.images()
        words = newest_rig.dump_words(job, images)
        words = [str(both) if word == str(ours) else word for word in words]
        dumped = newest_rig.run(words, images, "dump", PACKED)
        assert dumped.status != 0
        assert "has an image still open for writing" in dumped.errors
        require_unharmed(newest_rig, job, images)


@pytest.mark.parametrize("option", ["--page-server", "--lazy-pages", "--prev-images-dir"])
def test_what_sends_pages_elsewhere_is_refused(
    newest_rig: Rig, memory_job: Path, option: str
) -> None:
    with (
        running(newest_rig, memory_job, mib=1, criu_restores=True) as job,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):

        def hang_up() -> None:
            with suppress(OSError):  # nobody has come, and the server is closed
                server.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        images, before = newest_rig.images(), newest_rig.images()
        port = str(server.getsockname()[1])
        extra = {
            "--page-server": ["--page-server", "--address", "127.0.0.1", "--port", port],
            "--lazy-pages": ["--lazy-pages", "--port", "27"],
            "--prev-images-dir": ["--prev-images-dir", str(before)],
        }[option]
        assert newest_rig.dump(job, before, "--leave-running").status == 0
        dumped = newest_rig.dump(job, images, *extra, config=PACKED)
        assert dumped.status != 0
        assert 'layout = "packed" cannot be used with criu\'s' in dumped.errors, dumped.errors
        assert option in dumped.errors
        require_unharmed(newest_rig, job, images)


def test_what_was_changed_is_refused_before_anything_is_made(rig: Rig, memory_job: Path) -> None:
    with running(rig, memory_job, mib=1, criu_restores=True) as job:
        other, images = rig.images(), rig.images()
        for directory, extra in ((other, ["--leave-running"]), (images, [])):
            assert rig.dump(job, directory, *extra, config=PACKED).status == 0
        job.wait()
        output = job.log.read_bytes()

        def refusal(change: Callable[[Path], object]) -> str:
            copy = rig.copy(images)
            change(copy)
            restored = rig.restore(copy)
            assert restored.status != 0
            assert not job.alive_pids() and job.log.read_bytes() == output
            return restored.errors

        for name, said in (
            (PACK, "names: it belongs to another checkpoint"),
            ("gpustasis-manifest.img", "is not the one that CRIU's images in this directory"),
        ):
            replaced = refusal(lambda copy, name=name: shutil.copy(other / name, copy / name))
            assert said in replaced
        assert "No such file" in refusal(lambda copy: (copy / PACK).unlink())
        random = Random(7)
        size = (images / PACK).stat().st_size
        for at in [*(random.randrange(size) for _ in range(6)), 0, size - 1]:
            flip = lambda copy, at=at: flip_byte(copy / PACK, at)  # noqa: E731
            assert PACK in refusal(flip), at
        ids = images / f"ids-{job.pid}.img"
        last = ids.stat().st_size - 1  # of a number: CRIU itself finds nothing wrong
        changed = refusal(lambda copy: flip_byte(copy / ids.name, last))
        assert f"{ids.name}, which CRIU has read, is not the one that was packed" in changed
        assert "is not the one that was packed" in refusal(
            lambda copy: shutil.copy(copy / ids.name, copy / "ids-77.img")
        )
        assert rig.restore(images).status == 0
        job.run_on()


def flip_byte(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_what_criu_says_of_the_processor_is_there_when_it_is_read(
    rig: Rig, memory_job: Path
) -> None:
    with running(rig, memory_job, mib=1, criu_restores=True) as job:
        images = rig.images()
        assert rig.dump(job, images, "--cpu-cap=all", config=PACKED).status == 0
        job.wait()
        assert criu_images(images) == {"cpuinfo.img"}
        assert rig.restore(images, "--cpu-cap=all").status == 0
        job.run_on()


def test_a_pack_that_no_manifest_names_is_refused(newest_rig: Rig, memory_job: Path) -> None:
    with running(newest_rig, memory_job, mib=4) as job:
        packed, images = newest_rig.images(), newest_rig.images()
        first = newest_rig.dump(job, packed, "--leave-running", config=OURS | PACKED)
        assert first.status == 0, first.errors
        assert newest_rig.dump(job, images, config=OURS).status == 0
        job.wait()
        copy = newest_rig.copy(images)
        shutil.copy(packed / PACK, copy)
        restored = newest_rig.restore(copy)
        assert restored.status != 0 and "the manifest knows nothing of it" in restored.errors
        assert newest_rig.restore(images).status == 0
        job.run_on()


def test_cpu_memory_of_ours_and_a_chain_of_packed_checkpoints(rig: Rig, memory_job: Path) -> None:
    with running(rig, memory_job, mib=40, children=1, threads=0) as job:
        first, second = rig.images(), rig.images()
        config = OURS | PACKED
        assert rig.dump(job, first, "--leave-running", config=config).status == 0
        job.run_on()
        dumped = rig.dump(job, second, config=config | {"parent": str(first)})
        assert dumped.status == 0, dumped.errors
        job.wait()
        assert not criu_images(second)
        assert rig.restore(second).status == 0
        job.run_on()
