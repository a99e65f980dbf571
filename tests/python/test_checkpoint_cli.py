# SPDX-License-Identifier: Apache-2.0
"""checkpoint and restore from the command line, with every CRIU, on the emulator."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
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


def test_what_an_earlier_dump_has_logged_is_no_reason_for_this_one(
    gpustasis: Gpustasis, gpu_generations: Generations, images: Path
) -> None:
    """criu ends before it has a log."""
    earlier = "(00.1) Error (gpustasis): cuda_plugin: pid 7: no GPU, then\n"
    (images / "dump.log").write_text(earlier)
    job = gpu_generations()
    refused = gpustasis("checkpoint", str(job.pid), "-D", images, "--", "--no-such-option")
    assert refused.returncode == 12
    assert "no-such-option" in refused.stderr
    assert "no GPU" not in refused.stderr and "full log" not in refused.stderr
    assert (images / "dump.log").read_text() == earlier
    check_memory(job, 0)


def test_a_name_that_looks_like_an_error_of_the_plugin(
    criu: Criu,
    gpustasis: Gpustasis,
    compile_cuda: Callable[..., Path],
    emulator_environ: dict[str, str],
    tmp_path: Path,
) -> None:
    """criu logs it as it is, and whoever believes it takes a whole checkpoint for none."""
    folder = tmp_path / "a\n(00.1) Error (gpustasis): cuda_plugin: all is lost"
    folder.mkdir()
    program_of = Path(__file__).parent.parent / "programs" / "gpu_generations.c"
    for number, words in enumerate(
        (["/bin/sleep", "600"], [compile_cuda(program_of), "8", "1", "4"])
    ):
        job = Job(words, folder / "log", emulator_environ)
        try:
            if number:
                job.wait_for("ready")
            images = tmp_path / f"images-{number}"
            place = ("-D", images, "--criu", program(criu))
            dumped = gpustasis("checkpoint", str(job.pid), *place)
            assert dumped.returncode == 0, dumped.stderr
            assert "all is lost" in (images / "dump.log").read_text()
            assert job.wait() == -signal.SIGKILL
            restored = gpustasis("restore", *place)
            assert restored.returncode == 0, restored.stderr
            assert job.alive()
        finally:
            job.end()


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
    with suppress(ChildProcessError):  # criu may have reaped what it has killed
        job.wait()  # nobody has waited for the end of it
    assert not job.alive()


def test_statistics_that_stay_of_an_earlier_run_are_not_those_of_this_one(
    gpustasis: Gpustasis, gpu_generations: Generations, images: Path, tmp_path: Path
) -> None:
    """A directory that cannot be written to keeps them."""
    job = gpu_generations()
    assert gpustasis("checkpoint", str(job.pid), "-D", images).returncode == 0
    job.wait()
    assert gpustasis("restore", "-D", images).returncode == 0
    job.signal(signal.SIGKILL)
    job.wait()
    for words in (["--bind"], ["-o", "remount,ro,bind"]):
        subprocess.run(["mount", *words, images, images], check=True)
    try:
        restored = gpustasis("restore", "--json", "-D", images, "-W", tmp_path)
    finally:
        subprocess.run(["umount", images], check=True)
    assert restored.returncode == 0, restored.stderr
    assert json.loads(restored.stdout)["statistics"] is None
    check_memory(job, 0)


def test_a_process_that_is_not_there(gpustasis: Gpustasis, criu: Criu, images: Path) -> None:
    ended = gpustasis("checkpoint", str(2**22), "-D", images, "--criu", program(criu))
    assert ended.returncode == 12
    assert f"there is no process {2**22}" in ended.stderr


def test_a_directory_that_others_may_look_into_is_warned_of(
    gpustasis: Gpustasis, launch: Callable[..., Job], tmp_path: Path
) -> None:
    """CRIU's images hold memory, and anybody may read them. One that is made keeps others out, and
    so does the one that a stream is received into, in the place of an empty one."""
    job = launch(["/bin/sleep", "600"])
    for mode, warned in ((0o755, True), (0o710, True), (0o700, False), (None, False)):
        images = tmp_path / f"{mode}"
        if mode is not None:
            images.mkdir()
            images.chmod(mode)
        done = gpustasis("checkpoint", str(job.pid), "-D", images, "--leave-running")
        assert done.returncode == 0, done.stderr
        assert (f"may look into {images} (mode {mode or 0:04o})" in done.stderr) == warned
        assert images.stat().st_mode & 0o777 == (mode or 0o700)
    stream, place = tmp_path / "stream", tmp_path / "place"
    done = gpustasis("checkpoint", str(job.pid), "-o", stream, "--spool", tmp_path / "spool")
    assert done.returncode == 0, done.stderr
    job.wait()
    place.mkdir()
    place.chmod(0o755)
    done = gpustasis("restore", "-i", stream, "-D", place)
    assert done.returncode == 0, done.stderr
    assert place.stat().st_mode & 0o777 == 0o700
    assert job.alive()


def test_a_stream_goes_to_no_directory(gpustasis: Gpustasis, tmp_path: Path) -> None:
    for name in (".", "/", "..", "", str(tmp_path)):
        ended = gpustasis("checkpoint", "2", "-o", name)
        assert ended.returncode == 3, ended.stderr
        assert "is there already; name a new file" in ended.stderr


def test_running_and_stopped_exclude_each_other(gpustasis: Gpustasis, images: Path) -> None:
    ended = gpustasis("checkpoint", "2", "-D", images, "--leave-running", "--leave-stopped")
    assert ended.returncode == 2
    assert "exclude each other" in ended.stderr


def test_a_directory_without_a_checkpoint(gpustasis: Gpustasis, criu: Criu, images: Path) -> None:
    ended = gpustasis("restore", "-D", images, "--criu", program(criu))
    assert ended.returncode == 10
    assert "pstree.img" in ended.stderr
