# SPDX-License-Identifier: Apache-2.0
"""layout = "packed" where criu was told, or is able, to go another way; what it costs the job."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from campaigns.rig import Rig, Run
from campaigns.steady_job import SteadyJob
from gpustasis.criu.plugin import Scalar
from support.certificates import Pair
from support.cpu_memory import running
from support.memory_limit import inside, limited_cgroup
from support.other_plugin import with_plugin_before

PACKED: dict[str, Scalar] = {"layout": "packed"}
PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
PACK = "gpustasis-files.img"
MIB = 1 << 20
LAZY_SOCKET = "lazy-pages.socket"


def require_unharmed(rig: Rig, job: SteadyJob, images: Path) -> None:
    """What a dump that failed leaves: the job, and no checkpoint."""
    rig.settle(images)
    job.run_on()
    assert not (images / "inventory.img").exists()
    assert not (images / PACK).exists()


@contextmanager
def page_server() -> Iterator[int]:
    """A port at which nobody takes any pages."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            with suppress(OSError):  # nobody has come, and the server is closed
                server.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        yield server.getsockname()[1]


def configuration(rig: Rig, text: str) -> list[str]:
    """An option for criu: as a caller by RPC, or the host's own file, this asks for what no command
    line says."""
    path = rig.images() / "criu.conf"
    path.write_text(text)
    return ["--config", str(path)]


@pytest.mark.parametrize("way", ["--page-s", "--lazy", "--str", "page server in a file", "sockets"])
def test_what_sends_pages_elsewhere_is_refused_before_anything_is_frozen(
    newest_rig: Rig, memory_job: Path, way: str
) -> None:
    rig = newest_rig
    with running(rig, memory_job, mib=1, criu_restores=True) as job, page_server() as port:
        images = rig.images()
        with socket.socket(socket.AF_UNIX) as streamer:
            if way in ("--str", "sockets"):
                streamer.bind(str(images / "streamer-capture.sock"))
                streamer.listen()
            extra = {
                "--page-s": ["--page-s", "--address", "127.0.0.1", "--port", str(port)],
                "--lazy": ["--lazy", "--port", "27"],
                "--str": ["--str"],
                "page server in a file": configuration(
                    rig, f"page-server\naddress 127.0.0.1\nport {port}\n"
                ),
                "sockets": configuration(rig, "stream\n"),
            }[way]
            dumped = rig.dump(job, images, *extra, config=PACKED)
        assert dumped.status != 0
        assert 'layout = "packed" cannot be used with criu\'s --' in dumped.errors, dumped.errors
        assert "Seized task" not in dumped.log
        require_unharmed(rig, job, images)


def test_lazy_pages_that_no_command_line_names_fail_the_dump(rig: Rig, memory_job: Path) -> None:
    with running(rig, memory_job, mib=8, criu_restores=True) as job:
        images = rig.images()
        extra = configuration(rig, "lazy-pages\naddress 127.0.0.1\nport 27\n")
        dumped = rig.dump(job, images, *extra, config=PACKED)
        assert dumped.status == 1
        assert "criu has left pages out of its images" in dumped.errors, dumped.errors
        require_unharmed(rig, job, images)


@pytest.mark.parametrize("way", ["--lazy-pages", "in a file"])
def test_a_lazy_restore_is_refused_before_anything_is_made(
    newest_rig: Rig, memory_job: Path, way: str
) -> None:
    """The program that brings the pages finds none in a packed checkpoint: they would be zeros."""
    rig = newest_rig
    with running(rig, memory_job, mib=8, criu_restores=True) as job:
        images = rig.images()
        dumped = rig.dump(job, images, config=PACKED)
        assert dumped.status == 0, dumped.errors
        job.wait()
        output = job.log.read_bytes()
        place = images / LAZY_SOCKET
        with socket.socket(socket.AF_UNIX) as daemon:
            if way == "in a file":
                daemon.bind(str(place))
                daemon.listen()
            extra = [way] if way != "in a file" else configuration(rig, "lazy-pages\n")
            restored = rig.restore(images, *extra)
        assert restored.status != 0
        assert "cannot be used with criu's --lazy-pages" in restored.errors, restored.errors
        assert not job.alive_pids() and job.log.read_bytes() == output
        place.unlink(missing_ok=True)
        assert rig.restore(images).status == 0
        job.run_on()


def dump_behind(
    rig: Rig, job: SteadyJob, plugin: Path, images: Path, config: dict[str, Scalar]
) -> Run:
    words = with_plugin_before(rig, plugin, rig.dump_words(job, images))
    return rig.run(words, images, "dump", config)


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("hooks", [(10,), (10, 11)], ids=str)
def test_a_dump_that_did_not_begin_as_asked_is_none(
    newest_rig: Rig,
    memory_job: Path,
    me: Pair,
    compile_c: Callable[..., Path],
    hooks: tuple[int, ...],
    *,
    sealed: bool,
) -> None:
    """Another plugin answers for the tasks before they are frozen, and after."""
    answers = ",".join(f"[{hook}]=(void*)answer" for hook in hooks)
    answering = compile_c(PROGRAMS / "other_plugin.c", "-shared", "-fPIC", f"-DHOOKS={answers}")
    rig = newest_rig
    with running(rig, memory_job, mib=4, criu_restores=True) as job:
        images = rig.images()
        config: dict[str, Scalar] = {"recipients": [str(me.certificate)]} if sealed else PACKED
        dumped = dump_behind(rig, job, answering, images, config)
        assert dumped.status != 0
        told = "has not asked this plugin about any task" if 11 in hooks else "PAUSE_DEVICES"
        assert told in dumped.errors, dumped.errors
        require_unharmed(rig, job, images)
        assert rig.dump(job, rig.images(), "--leave-running", config=config).status == 0


def test_the_images_meet_their_own_end_before_that_of_criu(
    newest_rig: Rig, memory_job: Path
) -> None:
    """criu in a control group with less room than its images take: the kernel would kill it."""
    rig = newest_rig
    with (
        limited_cgroup(80 * MIB) as cgroup,
        running(rig, memory_job, mib=128, criu_restores=True) as job,
    ):
        images = rig.images()
        words = inside(cgroup, rig.dump_words(job, images))
        dumped = rig.run(words, images, "dump", PACKED)
        assert dumped.status == 1
        assert "there was no more memory for criu's images" in dumped.log
        require_unharmed(rig, job, images)


def test_what_was_taken_out_of_the_job_has_its_place(newest_rig: Rig) -> None:
    """Should the dump fail, it is put back while criu's images are in memory still."""
    rig = newest_rig
    with rig.job(mib=8, children=1) as job:
        for externalize in (True, False):
            images = rig.images()
            dumped = rig.dump(
                job, images, "--leave-running", config=PACKED | {"externalize": externalize}
            )
            assert dumped.status == 0, dumped.errors
            told = json.loads((images / "gpustasis-dump.json").read_text())
            staged = sum(task["staged_bytes"] for task in told["tasks"] if task["externalized"])
            kept = re.findall(r"(\d+) MiB are kept for what was taken out of the job", dumped.log)
            assert len(kept) == len(job.pids)
            assert int(kept[-1]) == staged // MIB
            assert bool(staged) == externalize
            job.run_on()
