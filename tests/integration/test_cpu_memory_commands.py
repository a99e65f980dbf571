# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with CPU memory in images of ours, as the commands and the Python API make, show,
copy, seal and restore them, with real CRIU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import gpustasis as api
from campaigns.rig import Rig
from campaigns.steady_job import SteadyJob
from gpustasis._core import ImageReader, MemoryKind, image_name, read_manifest
from gpustasis.criu.plugin import Scalar
from gpustasis.recovery import GUARDIAN_COMM, WORKER_COMM
from gpustasis.task import find_users
from support.certificates import Pair
from support.cpu_memory import OURS, pages_bytes, running
from support.job import TIMEOUT_S
from support.json_output import check_document
from support.live_sealing import sealed_for
from support.recipients import make_recipient

MIB = 48
Gpustasis = Callable[..., CompletedProcess[str]]


@pytest.fixture
def environ(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """The rig: the test itself is on the emulator, and takes the rig's criu."""
    for name, value in rig.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GPUSTASIS_CRIU", str(rig.criu.root or rig.criu.program))
    return rig


def image_of(directory: Path, job: SteadyJob) -> Path:
    return directory / image_name(job.pid, MemoryKind.CPU)


@pytest.mark.one_criu
def test_a_job_s_life(rig: Rig, gpustasis: Gpustasis, memory_job: Path, tmp_path: Path) -> None:
    program = ("--criu", str(rig.criu.root or rig.criu.program))
    store = tmp_path / "store"
    one, two, flat = store / "one", store / "two", store / "flat"

    def run(command: str, *words: str | Path) -> str:
        done = gpustasis(*command.split(), *words)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    with running(rig, memory_job, mib=MIB) as job:
        words = (str(job.pid), *program, "--cpu-memory", "ours", "-D")
        found = check_document(run("checkpoint --json", *words, one, "-R"), "checkpoint")
        assert found["statistics"]["tasks"] == []
        (told,) = found["statistics"]["cpu_memory"]
        assert told["pid"] == job.pid and told["left_because"] == ""
        assert told["plain_bytes"] > MIB << 20 and told["same_bytes"] == 0
        said = run("checkpoint", *words, two, "--parent", one)
        assert "no CUDA process in it, " in said
        assert (
            " of CPU memory (" in said and " of it in earlier checkpoints already) stored" in said
        )
        job.wait()

        shown = check_document(run("inspect --json", two), "inspect")
        (process,) = shown["processes"]
        assert process["cuda"] is None and shown["backend"] is None and shown["gpus"] == []
        assert process["cpu_memory"]["file"] == image_of(two, job).name
        assert process["cpu_memory"]["sources"][0]["file"] == image_of(one, job).name
        assert shown["cpu_image_bytes"] == image_of(two, job).stat().st_size
        checked = check_document(run("verify --json", two), "verify")
        assert checked["images"] == 1 and checked["earlier_checkpoints"] == 1
        assert (
            checked["cpu_bytes"] == checked["plain_bytes"] == process["cpu_memory"]["plain_bytes"]
        )
        changed = check_document(run("diff --json", one, two), "diff")
        assert [task["memory"] for task in changed["tasks"]] == ["cpu"]
        listed = check_document(run("list --json", store), "list")["entries"]
        assert [(each["tasks"], each["complete"]) for each in listed] == [(1, True), (1, True)]
        assert listed[1]["memory_bytes"] == checked["plain_bytes"]
        assert check_document(run("flatten --json", two, "-o", flat), "flatten")["images"] == 1
        assert ImageReader.open(image_of(flat, job)).info.sources == []
        check_document(run("prune --json", store, "--keep-last", "1", "--dry-run"), "prune")

        # What was flattened, sealed, and opened again, needs nothing of the others.
        me = make_recipient(tmp_path)
        sealed, opened = tmp_path / "sealed", tmp_path / "opened"
        run("seal", flat, "--to", me.certificate, "-o", sealed)
        assert not image_of(sealed, job).exists()
        run("unseal", sealed, "--key", me.key, "-o", opened)
        done = gpustasis("verify", sealed)
        assert done.returncode != 0 and "is sealed" in done.stderr
        assert image_of(opened, job).read_bytes() == image_of(flat, job).read_bytes()
        said = run("restore", "-D", opened, *program)
        assert "no CUDA process in it, " in said and " of CPU memory" in said
        job.run_on()


def test_the_python_api(environ: Rig, memory_job: Path, tmp_path: Path) -> None:
    with running(environ, memory_job, mib=100) as job:
        with pytest.raises(api.CriuError, match="cpu_memory"):
            api.checkpoint(job.pid, tmp_path / "wrong", cpu_memory="theirs")
        job.run_on(1)
        left = api.checkpoint(job.pid, tmp_path / "criu", cpu_memory="criu", leave_running=True)
        assert pages_bytes(left.path) > 100 << 20 and not image_of(left.path, job).exists()
        auto = api.checkpoint(job.pid, tmp_path / "auto", cpu_memory="auto", leave_running=True)
        assert auto.dump is not None and auto.dump.statistics is not None
        (told,) = auto.dump.statistics.cpu_memory
        assert told.plain_bytes > 100 << 20 and told.stored_twice_bytes == 0
        ours = api.checkpoint(job.pid, tmp_path / "ours", cpu_memory="ours", parent=auto)
        job.wait()
        assert ours.verify().problems == []
        assert ours.inspect().processes[0].cpu_memory is not None
        needed = ours.requirements()
        assert needed is not None and needed.gpus == () and needed.driver_version == ""
        assert ours.restore().pid == job.pid
        job.run_on()


def test_a_restored_tree_without_gpu_state_can_be_left_stopped(
    environ: Rig, memory_job: Path, tmp_path: Path
) -> None:
    with running(environ, memory_job, mib=MIB) as job:
        made = api.checkpoint(job.pid, tmp_path / "one", cpu_memory="ours")
        job.wait()
        before = job.log.read_bytes()
        made.restore(leave_stopped=True)
        job.await_stopped()
        assert job.log.read_bytes() == before
        for pid in job.pids:
            os.kill(pid, signal.SIGCONT)
        job.run_on()


def test_a_stream_where_there_is_no_driver(
    newest_rig: Rig, memory_job: Path, tmp_path: Path
) -> None:
    """Of a job without CUDA it carries CPU memory all the same, and neither end asks a driver."""
    no_driver = newest_rig.environment({"driver": "libno-such-driver.so.1", "cpu_memory": "ours"})
    criu = str(newest_rig.criu.root or newest_rig.criu.program)

    def run(job: SteadyJob, *words: str | Path) -> str:
        argv = [sys.executable, "-m", "gpustasis", *map(str, words), "--criu", criu]
        with subprocess.Popen(
            argv, env=no_driver, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as child:
            deadline = time.monotonic() + TIMEOUT_S
            while child.poll() is None:
                job.reap()  # a sender waits for the end of each of its processes
                if time.monotonic() > deadline:
                    child.kill()
                time.sleep(0.01)
            assert child.stdout is not None and child.stderr is not None
            assert child.returncode == 0, child.stderr.read()
            return child.stdout.read()

    with running(newest_rig, memory_job, mib=MIB) as job:
        said = run(
            job, "checkpoint", str(job.pid), "-o", tmp_path / "stream", "--spool", tmp_path / "s"
        )
        assert " of CPU memory stored in " in said
        assert (tmp_path / "stream").stat().st_size > MIB << 17
        kept = tmp_path / "kept"
        said = run(job, "restore", "-i", tmp_path / "stream", "-D", kept)
        assert " of CPU memory" in said and image_of(kept, job).is_file()
        job.run_on()


@contextmanager
def stopped_before_the_end(
    rig: Rig, job: SteadyJob, images: Path, config: Mapping[str, Scalar]
) -> Iterator[subprocess.Popen[bytes]]:
    """A dump that has stored all memory and waits in a script; it is killed at the end."""
    reached, script = rig.scratch / "reached", rig.scratch / "script"
    script.write_text(
        '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0\n'
        f"touch {reached}\nexec sleep 60\n"
    )
    script.chmod(0o755)
    words = rig.dump_words(job, images, ["--leave-running", "--action-script", str(script)])
    with subprocess.Popen(
        words, env=rig.environment(config), stdin=subprocess.DEVNULL, start_new_session=True
    ) as criu:
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while not reached.exists():
                assert criu.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
            yield criu
        finally:
            os.killpg(criu.pid, signal.SIGKILL)


def recover(rig: Rig, pid: int, images: Path, *words: str | Path) -> CompletedProcess[str]:
    argv = [sys.executable, "-m", "gpustasis", "recover", str(pid), "-D", str(images), *words]
    return subprocess.run(
        argv, env=rig.environ, capture_output=True, text=True, check=False, timeout=120
    )


def test_recover_puts_back_gpu_memory_and_leaves_cpu_memory_alone(newest_rig: Rig) -> None:
    with newest_rig.job(module=newest_rig.programs.kernels, mib=32) as job:
        images = newest_rig.images()
        with stopped_before_the_end(newest_rig, job, images, OURS):
            kinds = {task.kind for task in read_manifest(images).tasks}
            assert kinds == {MemoryKind.GPU, MemoryKind.CPU}
            for helper in find_users(images, WORKER_COMM, GUARDIAN_COMM):
                os.kill(helper, signal.SIGKILL)
        staged = sum(r.length for r in ImageReader.open(images / image_name(job.pid)).info.regions)
        done = recover(newest_rig, job.pid, images)
        assert done.returncode == 0, done.stderr
        assert f"({staged / 2**20:.1f} MiB of GPU memory put back)" in done.stdout
        job.run_on()


def test_recover_of_a_process_without_cuda_has_nothing_to_do(
    newest_rig: Rig, memory_job: Path
) -> None:
    """Nothing was taken out of it: it runs on by itself once criu is dead."""
    with running(newest_rig, memory_job, mib=MIB) as job:
        images = newest_rig.images()
        with stopped_before_the_end(newest_rig, job, images, OURS):
            assert [task.kind for task in read_manifest(images).tasks] == [MemoryKind.CPU]
            done = recover(newest_rig, job.pid, images)
            assert done.returncode == 3 and "is traced by process" in done.stderr
        job.run_on()
        done = recover(newest_rig, job.pid, images)
        assert done.returncode == 0, done.stderr
        assert "runs: there was nothing to do" in done.stdout
        # No driver is needed for it; of another process with the same images, it is asked.
        no_driver = newest_rig.environment({"driver": "libno-such-driver.so.1"})
        done = recover(replace(newest_rig, environ=no_driver), job.pid, images)
        assert done.returncode == 0, done.stderr
        whole = newest_rig.images()
        assert newest_rig.dump(job, whole, config=OURS).status == 0
        job.wait()
        assert newest_rig.restore(whole).status == 0
        job.run_on()
        done = recover(replace(newest_rig, environ=no_driver), job.pid, images)  # of its pid
        assert done.returncode == 11 and "libno-such-driver" in done.stderr


def test_recover_of_a_process_without_cuda_whose_dump_is_sealed_asks_no_driver(
    newest_rig: Rig, memory_job: Path, me: Pair
) -> None:
    """Of a sealed dump the manifest comes last."""
    with running(newest_rig, memory_job, mib=MIB) as job:
        images = newest_rig.images()
        config = sealed_for(me, **OURS)
        no_driver = replace(
            newest_rig, environ=newest_rig.environment({"driver": "libno-such-driver.so.1"})
        )
        with stopped_before_the_end(newest_rig, job, images, config):
            assert (images / "gpustasis-sealed-2.img").exists()
        job.run_on()
        for whole in (True, False):
            if not whole:
                (images / "gpustasis-sealed.img").unlink(missing_ok=True)
            done = recover(no_driver, job.pid, images, "--key", me.key)
            assert done.returncode == 0, done.stderr
            assert "runs: there was nothing to do" in done.stdout
            done = recover(no_driver, job.pid, images)
            assert done.returncode == 14 and "is sealed: name the private key" in done.stderr
        done = recover(no_driver, os.getpid(), images, "--key", me.key)  # of another process
        assert done.returncode == 11 and "libno-such-driver" in done.stderr
        job.run_on()
