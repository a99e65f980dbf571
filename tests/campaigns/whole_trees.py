# SPDX-License-Identifier: Apache-2.0
"""One job with much of what a checkpoint has to bring back, there and back in each way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from campaigns.rig import Rig
from campaigns.tally import Tally
from gpustasis.criu.plugin import Scalar
from support.certificates import Pair
from support.elsewhere import Elsewhere
from support.whole_tree import PROCESSES, WHOLE, Way, WholeTree

_NAME = "whole_tree"
_STREAM_S = 240.0  # a busy machine takes a while
_SEEN_S = 10.0
_END = re.compile(r"^(?:(\d+) failed, )?(\d+) passed.* in \d", re.MULTILINE)


def round_trip(rig: Rig, job: WholeTree, way: Way, elsewhere: Elsewhere, me: Pair) -> Path:
    """Checkpoint the job, which ends it, and restore it: here, or a stream elsewhere. Fails if
    anything of it is not as it was. Returns the images, of a stream those that were received."""
    dump: dict[str, Scalar] = dict(way.config)
    restore: dict[str, Scalar] = {}
    if way.sealed:
        dump["recipients"] = [str(me.certificate)]
        restore["private_key"] = str(me.key)
    for _ in range(way.earlier):
        earlier = rig.images()
        dumped = rig.dump(job, earlier, "--leave-running", config=dump)
        assert dumped.status == 0, dumped.errors
        job.run_on()
        dump |= {"parent": str(earlier)} | restore  # the key opens the parent, too
    threads = job.threads()
    images = rig.scratch / f"stream-{time.monotonic_ns()}" if way.streamed else rig.images()
    if way.streamed:
        _send(rig, job, elsewhere, images, dump, restore)
        way.require_taken(images)
        job.run_on_elsewhere()
        return images
    dumped = rig.dump(job, images, config=dump)
    assert dumped.status == 0, dumped.errors
    job.wait()
    rig.settle(images)
    way.require_taken(images)
    restored = rig.restore(images, config=restore)
    assert restored.status == 0, restored.errors
    job.run_on()
    assert job.threads() == threads
    return images


def _send(
    rig: Rig,
    job: WholeTree,
    elsewhere: Elsewhere,
    images: Path,
    dump: dict[str, Scalar],
    restore: dict[str, Scalar],
) -> None:
    """Through a socket between two network namespaces."""
    named = {"GPUSTASIS_CRIU": str(rig.criu.root or rig.criu.program)}
    program = [sys.executable, "-m", "gpustasis"]
    log = images.with_name(f"{images.name}.log")
    with log.open("wb") as errors:
        words = [*program, "restore", "-i", "-", "-D", str(images)]
        receiver, link = elsewhere.connect(words, rig.environment(restore) | named, errors)
        words = [*program, "checkpoint", str(job.pid), "-o", "-", "--spool", f"{images}.spool"]
        with (
            link,
            subprocess.Popen(
                words,
                env=rig.environment(dump) | named,
                stdin=subprocess.DEVNULL,
                stdout=link.fileno(),
                stderr=errors,
            ) as sender,
        ):
            deadline = time.monotonic() + _STREAM_S
            while sender.poll() is None:
                job.reap()
                if time.monotonic() > deadline:
                    sender.kill()
                time.sleep(0.01)
        receiver.wait(_STREAM_S)
    assert (sender.returncode, receiver.returncode) == (0, 0), log.read_text()
    # One that the kernel is just letting go of may not be seen: all of them are, and stay.
    deadline = time.monotonic() + _SEEN_S
    while len(jobs := elsewhere.jobs(_NAME)) != PROCESSES:
        assert time.monotonic() < deadline, f"{len(jobs)} processes, not {PROCESSES}: {jobs}"
        time.sleep(0.01)


def run_tests(repository: Path, file: str) -> Tally:
    """The whole matrix of a file of tests, which take a part of it by themselves."""
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{file}"],
        cwd=repository,
        env=os.environ | {WHOLE: "1", "COLUMNS": "2000"},  # each failure's reason, in its line
        capture_output=True,
        text=True,
        check=False,
    )
    tally = Tally()
    found = _END.search(ended.stdout)
    tally.counts["trials"] = sum(int(number or 0) for number in found.groups()) if found else 1
    if ended.returncode != 0 or found is None:
        lines = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        tally.failures += lines or [ended.stdout[-2000:] + ended.stderr[-1000:]]
    return tally
