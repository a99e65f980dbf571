# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that do not simply kill the program: of one that is left running, of two in one tree,
and dumps whose criu is killed. Each ends with what a run left alone computes, to the bit."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpustasis import process
from gpustasis.criu.find import Criu
from gpustasis.criu.images import FILES_NAME, parse_open_files, read_pstree
from gpustasis.criu.plugin import Scalar
from gpustasis.criu.run import Run as Dumped
from gpustasis.criu.run import Settings, dump, restore
from gpustasis.errors import CriuError
from gpustasis_bench.demo.report import image_bytes, read_statistics, sum_of
from gpustasis_bench.demo.training import Program, Result, Run

_POLL_SECONDS = 0.002
_RECOVER_SECONDS = 300
_KILLED_AT = (0.1, 0.4, 0.7, 0.8, 0.9)  # of a dump's time
_WRITING_TRIES = 5  # for a dump that is killed while it writes
_RUN_OVER = "the run had ended by itself"
_TOO_LATE = ("there was nothing to do", _RUN_OVER)  # what is said of a dump that was over
_PHASES = (
    *("lock", "driver_checkpoint", "write", "drop", "undo", "driver_undo"),
    *("refill", "driver_restore"),
)

Record = dict[str, Any]


class Standstill:
    """The longest time between two lines of a run's output, while it is watched."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._ended = threading.Event()
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def end(self) -> float:
        """Seconds; a moment after the last line counts as well."""
        time.sleep(0.1)
        self._ended.set()
        self._thread.join()
        return self.seconds

    def _watch(self) -> None:
        size, at = self._log.stat().st_size, time.monotonic()
        while not self._ended.is_set():
            now_size, now = self._log.stat().st_size, time.monotonic()
            if now_size != size:
                self.seconds = max(self.seconds, now - at)
                size, at = now_size, now
            time.sleep(_POLL_SECONDS)


class Checkpoints:
    """In the folder `work`, which is there and empty. `program` takes `reference`'s steps."""

    def __init__(self, program: Program, criu: Criu, work: Path, reference: Result) -> None:
        self._program = program
        self._criu = criu
        self._work = work
        self._reference = reference
        self._steps = int(reference.raw["steps"])

    def left_running(self) -> Record:
        """Two dumps of a run that goes on, the second built on the first, then a restore of each.

        Raises CriuError if anything computes other bits; DemoError.
        """
        run = self._start("left-running")
        log = run.folder / "output.txt"
        record: Record = {"dumps": [], "restores": []}
        taken: list[Path] = []
        try:
            run.await_mark()
            settings: dict[str, Scalar] = {}
            for name in ("first", "second"):
                images = self._images(f"left-running-{name}")
                watched = Standstill(log)
                dumped = dump(
                    self._criu, run.pid, images, Settings(plugin=settings), leave_running=True
                )
                record["dumps"].append(
                    {"stood_still_seconds": round(watched.end(), 3), **_figures(dumped, images)}
                )
                settings = {"parent": f"../{images.name}"}
                taken.append(images)
            self._require_same(run.await_result(), "a run that was left running")
            for images in reversed(taken):
                _bring_back_size(log, images)
                run.expect_again()
                restored = restore(self._criu, images)
                record["restores"].append(round(restored.seconds, 3))
                self._require_same(run.await_result(), f"a restore of {images.name}")
        finally:
            run.kill()
        return record

    def two_processes(self) -> list[Record]:
        """Two of them in one tree, with one driver call at a time and with two."""
        return [self._two(parallel) for parallel in (1, 2)]

    def _two(self, parallel: int) -> Record:
        place = self._work / f"two-{parallel}"
        words = []
        for name in ("a", "b"):
            (place / name).mkdir(parents=True)
            arguments = [*self._program.arguments(self._steps), "--result", f"{name}/result.json"]
            arguments += ["--mark-step", str(self._steps // 3), "--mark-file", f"{name}/mark"]
            words.append(f"{shlex.join(arguments)} >{name}/output.txt 2>&1 &")
        tree = subprocess.Popen(
            ["/bin/sh", "-c", "\n".join([*words, "wait"])],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=place,
        )
        images = self._images(f"two-{parallel}")
        settings = Settings(plugin={"parallel_gpus": parallel})
        try:
            while not all((place / name / "mark").exists() for name in ("a", "b")):
                if tree.poll() is not None:
                    raise CriuError("two processes: they ended early")
                time.sleep(_POLL_SECONDS)
            dumped = dump(self._criu, tree.pid, images, settings)
            tree.wait()
            for task in read_pstree(images):
                with suppress(ChildProcessError):
                    os.waitpid(task.pid, 0)
            restored = restore(self._criu, images, settings)
            os.waitpid(tree.pid, 0)
            for name in ("a", "b"):
                raw = json.loads((place / name / "result.json").read_text(encoding="ascii"))
                self._require_same(Result(raw=raw), f"process {name} of two")
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(tree.pid, signal.SIGKILL)
        return {
            "parallel": parallel,
            "restore_seconds": round(restored.seconds, 3),
            **_figures(dumped, images),
        }

    def killed_dumps(self) -> list[Record]:
        """Of a dump, criu and all processes of the plugin are killed, at several moments; then
        `gpustasis recover` brings the run back. How long a dump takes is not the same twice; so the
        last one is killed when GPU memory is seen to be written, after the driver's checkpoint. On
        a busy machine a dump may be over before it is seen: then one more is killed. Raises
        CriuError if that is so of all."""
        run = self._start("not-killed")
        try:
            run.await_mark()
            whole = dump(self._criu, run.pid, self._images("not-killed")).seconds
        finally:
            run.kill()
        at_times = [
            self._killed(f"killed-{number}", at * whole) for number, at in enumerate(_KILLED_AT)
        ]
        writing = []
        for number in range(_WRITING_TRIES):
            writing.append(self._killed(f"killed-writing-{number}", None))
            if not any(words in writing[-1]["recover"] for words in _TOO_LATE):
                return [*at_times, *writing]
        raise CriuError(f"none of {_WRITING_TRIES} dumps could be killed while it wrote")

    def _killed(self, name: str, after: float | None) -> Record:
        run = self._start(name)
        images = self._images(name)
        try:
            run.await_mark()
            place = str(self._criu.root or self._criu.program)
            words = ["checkpoint", str(run.pid), "-D", str(images), "--criu", place]
            words += ["--leave-running"]  # one that is killed too late has done its work
            dumping = subprocess.Popen(
                [sys.executable, "-m", "gpustasis", *words],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            while not _dumping_into(images) and dumping.poll() is None:
                time.sleep(_POLL_SECONDS)
            seen = time.monotonic()
            if after is None:
                while not _is_written(images, run.pid) and dumping.poll() is None:
                    time.sleep(_POLL_SECONDS)
            else:
                time.sleep(after)
            victims = _kill(images)
            killed_after = time.monotonic() - seen
            dumping.wait()
            begin = time.monotonic()
            said = self._recover(run, images)
            seconds = time.monotonic() - begin
            self._require_same(
                run.await_result(), f"a run whose dump was killed after {killed_after:.2f} s"
            )
        finally:
            run.kill()
        return {
            "killed_after_seconds": round(killed_after, 3),
            "killed": victims,
            "recover_seconds": round(seconds, 3),
            "recover": said,
        }

    def _recover(self, run: Run, images: Path) -> str:
        """What it said, without the pid. The directory is named where it is not found by itself. A
        dump that is killed late is over, and its run may have reached its end meanwhile."""
        pid = run.pid
        words = [sys.executable, "-m", "gpustasis", "recover", str(pid)]
        for more in ([], ["-D", str(images)]):
            ended = process.run([*words, *more], timeout_s=_RECOVER_SECONDS)
            if ended.status == 0:
                return ended.output.strip().replace(str(pid), "PID")
        if run.has_ended():
            return _RUN_OVER
        raise CriuError(f"gpustasis recover of a killed dump: {ended.output.strip()[-300:]}")

    def _start(self, name: str) -> Run:
        return Run(self._program, self._work / name, self._steps, self._steps // 3)

    def _images(self, name: str) -> Path:
        images = self._work / f"{name}-images"
        images.mkdir(mode=0o700)
        return images

    def _require_same(self, result: Result, what: str) -> None:
        if result.computed != self._reference.computed or not result.intact:
            raise CriuError(f"{what} did not compute the same bits")


def _figures(dumped: Dumped, images: Path) -> Record:
    record = read_statistics(images, "dump")
    return {
        "dump_seconds": round(dumped.seconds, 3),
        "stored_bytes": image_bytes(images),
        "staged_bytes": int(sum_of(record, "staged_bytes")),
        "phases_ms": {
            phase: round(spent, 1)
            for phase in _PHASES
            if (spent := sum_of(record, "phases_ms", phase))
        },
    }


def _bring_back_size(log: Path, images: Path) -> None:
    """CRIU restores no file of another size: as long as the run went on, its output grew."""
    path = images / FILES_NAME
    sizes = {
        Path(name).name: size
        for name, size in parse_open_files(path.read_bytes(), str(path)).values()
    }
    os.truncate(log, sizes[log.name])


def _is_written(images: Path, pid: int) -> bool:
    """Whether something is in its image, which has another name until it is whole."""
    name = f"gpustasis-{pid}.img"
    for path in (images / f".{name}.part", images / name):
        with suppress(FileNotFoundError):
            if path.stat().st_size > 0:
                return True
    return False


def _kill(images: Path) -> int:
    """Processes that were killed; what appeared meanwhile is killed as well."""
    killed: set[int] = set()
    while found := set(_dumping_into(images)) - killed:
        for pid in sorted(found):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
    return len(killed)


def _dumping_into(images: Path) -> list[int]:
    """criu and what has its command line: the plugin's worker and guardians."""
    wanted = {b"dump", os.fsencode(images)}
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and wanted <= set(
                (entry / "cmdline").read_bytes().split(b"\0")
            ):
                found.append(int(entry.name))
    return found
