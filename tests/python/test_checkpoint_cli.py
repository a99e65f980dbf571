# SPDX-License-Identifier: Apache-2.0
"""checkpoint and restore from the command line, with every CRIU, on the emulator."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from gpustasis.criu.find import Criu
from support.job import Job

Gpustasis = Callable[..., CompletedProcess[str]]
Generations = Callable[..., Job]


def program(criu: Criu) -> str:
    return str(criu.root or criu.program)


def check_memory(job: Job, generation: int) -> None:
    """The job's GPU memory is what it wrote, to the bit."""
    job.signal(signal.SIGUSR1)
    job.wait_for(f"intact {generation}\n")


def test_there_and_back(
    criu: Criu, gpustasis: Gpustasis, gpu_generations: Generations, images: Path
) -> None:
    job = gpu_generations()
    check_memory(job, 0)
    dumped = gpustasis("checkpoint", str(job.pid), "-D", images, "--criu", program(criu))
    assert dumped.returncode == 0, dumped.stderr
    assert "1 CUDA process, 12.0 MiB of GPU memory" in dumped.stdout
    assert "emulator" in dumped.stdout
    assert criu.version_text in dumped.stdout
    assert job.wait() == -signal.SIGKILL

    restored = gpustasis("restore", "-D", images, "--criu", program(criu))
    assert restored.returncode == 0, restored.stderr
    assert f"process {job.pid} runs" in restored.stdout
    assert "emulator" in restored.stdout
    check_memory(job, 1)
    job.signal(signal.SIGTERM)
    assert job.wait() == 0
    assert (images / "dump.log").stat().st_size > 0
    assert (images / "restore.log").stat().st_size > 0


def test_leave_running(
    criu: Criu, gpustasis: Gpustasis, gpu_generations: Generations, images: Path
) -> None:
    job = gpu_generations()
    words = ["checkpoint", str(job.pid), "-D", images, "--leave-running", "--criu", program(criu)]
    dumped = gpustasis(*words)
    assert dumped.returncode == 0, dumped.stderr
    check_memory(job, 0)
    check_memory(job, 1)

    again = gpustasis(*words)
    assert again.returncode == 3
    assert "holds a checkpoint already" in again.stderr


def test_stop(criu: Criu, gpustasis: Gpustasis, gpu_generations: Generations, images: Path) -> None:
    job = gpu_generations()
    dumped = gpustasis(
        "checkpoint", str(job.pid), "-D", images, "--leave-stopped", "--criu", program(criu)
    )
    assert dumped.returncode == 0, dumped.stderr
    job.await_stopped()
    job.signal(signal.SIGCONT)
    check_memory(job, 0)


def test_a_restored_tree_is_left_stopped(
    criu: Criu, gpustasis: Gpustasis, launch: Callable[..., Job], images: Path
) -> None:
    job = launch(["/bin/sleep", "600"])
    words = ("-D", images, "--criu", program(criu))
    assert gpustasis("checkpoint", str(job.pid), *words).returncode == 0
    assert job.wait() == -signal.SIGKILL
    restored = gpustasis("restore", *words, "--leave-stopped")
    assert restored.returncode == 0, restored.stderr
    assert f"process {job.pid} is stopped" in restored.stdout
    job.await_stopped()
    job.signal(signal.SIGCONT)
    job.signal(signal.SIGTERM)
    assert job.wait() == -signal.SIGTERM


@pytest.mark.parametrize("words", [["--leave-stopped"], ["--", "--leave-stopped"], ["--", "-s"]])
def test_a_tree_with_gpu_state_cannot_be_restored_stopped(
    criu: Criu,
    gpustasis: Gpustasis,
    gpu_generations: Generations,
    images: Path,
    words: list[str],
) -> None:
    """The driver restores through a thread of the process: CRIU would stop that, and all be killed
    after the work is done."""
    job = gpu_generations()
    check_memory(job, 0)
    place = ("-D", images, "--criu", program(criu))
    assert gpustasis("checkpoint", str(job.pid), *place).returncode == 0
    assert job.wait() == -signal.SIGKILL
    refused = gpustasis("restore", *place, *words)
    assert refused.returncode == 3
    assert "--leave-stopped" in refused.stderr or "-s is set by gpustasis" in refused.stderr
    assert not (images / "restore.log").exists()


@pytest.mark.parametrize("compress", ["lz4", "none"])
def test_options_reach_the_plugin(
    criu: Criu, gpustasis: Gpustasis, gpu_generations: Generations, images: Path, compress: str
) -> None:
    job = gpu_generations()
    dumped = gpustasis(
        *("checkpoint", str(job.pid), "-D", images, "--criu", program(criu)),
        *("--compress", compress, "--threads", "2", "--leave-running"),
    )
    assert dumped.returncode == 0, dumped.stderr
    stored = (images / f"gpustasis-{job.pid}.img").stat().st_size
    assert (stored < 7 << 20) == (compress == "lz4")


def test_externalize_off_leaves_the_memory_to_criu(
    criu: Criu, gpustasis: Gpustasis, gpu_generations: Generations, images: Path
) -> None:
    job = gpu_generations()
    words = ["checkpoint", str(job.pid), "-D", images, "--criu", program(criu)]
    dumped = gpustasis(*words, "--externalize", "off")
    assert dumped.returncode == 0, dumped.stderr
    assert not (images / f"gpustasis-{job.pid}.img").exists()
    assert sum(file.stat().st_size for file in images.glob("pages-*.img")) > 12 << 20
    assert job.wait() == -signal.SIGKILL
    restored = gpustasis("restore", "-D", images, "--criu", program(criu))
    assert restored.returncode == 0, restored.stderr
    check_memory(job, 0)


def test_arguments_after_two_dashes_go_to_criu(
    criu: Criu, gpustasis: Gpustasis, gpu_generations: Generations, images: Path
) -> None:
    job = gpu_generations()
    words = ["checkpoint", str(job.pid), "-D", images, "--criu", program(criu)]
    refused = gpustasis(*words, "--", "--no-such-option")
    assert refused.returncode == 12
    assert "no-such-option" in refused.stderr
    check_memory(job, 0)


def test_a_pidfile_after_two_dashes_is_refused_before_anything_is_restored(
    criu: Criu, gpustasis: Gpustasis, gpu_generations: Generations, images: Path
) -> None:
    """criu would write the pid there, and we would look for it elsewhere once the job runs."""
    job = gpu_generations()
    words = ["-D", images, "--criu", program(criu)]
    assert gpustasis("checkpoint", str(job.pid), *words).returncode == 0
    job.wait()
    refused = gpustasis("restore", *words, "--", "--pidfile", images / "elsewhere")
    assert refused.returncode == 3
    assert "--pidfile is set by gpustasis itself" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not job.alive()
    assert gpustasis("restore", *words).returncode == 0
    check_memory(job, 0)


def test_a_damaged_image_is_refused_with_the_reason(
    criu: Criu, gpustasis: Gpustasis, gpu_generations: Generations, images: Path
) -> None:
    job = gpu_generations()
    dumped = gpustasis("checkpoint", str(job.pid), "-D", images, "--criu", program(criu))
    assert dumped.returncode == 0, dumped.stderr
    job.wait()
    image = images / f"gpustasis-{job.pid}.img"
    raw = bytearray(image.read_bytes())
    raw[len(raw) // 2] ^= 1
    image.write_bytes(raw)
    restored = gpustasis("restore", "-D", images, "--criu", program(criu))
    assert restored.returncode == 12
    assert "plugin: " in restored.stderr
    assert image.name in restored.stderr
    assert "full log: " in restored.stderr
    assert not job.alive()


def test_a_process_that_is_not_there(gpustasis: Gpustasis, criu: Criu, images: Path) -> None:
    ended = gpustasis("checkpoint", str(2**22), "-D", images, "--criu", program(criu))
    assert ended.returncode == 12
    assert f"there is no process {2**22}" in ended.stderr


def test_running_and_stopped_exclude_each_other(gpustasis: Gpustasis, images: Path) -> None:
    ended = gpustasis("checkpoint", "2", "-D", images, "--leave-running", "--leave-stopped")
    assert ended.returncode == 2
    assert "exclude each other" in ended.stderr


def test_a_directory_without_a_checkpoint(gpustasis: Gpustasis, criu: Criu, images: Path) -> None:
    ended = gpustasis("restore", "-D", images, "--criu", program(criu))
    assert ended.returncode == 10
    assert "pstree.img" in ended.stderr
