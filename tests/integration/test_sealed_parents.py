# SPDX-License-Identifier: Apache-2.0
"""Which sealed checkpoint a dump is built on, with real CRIU: never on what it would replace, and
its key is asked for once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from campaigns.rig import Rig, log_path
from gpustasis._core import PARENT_LINK
from support.certificates import Pair
from support.cpu_memory import refused
from support.job import Job
from support.live_sealing import key_of

from .test_sealed_chain import dump, on_top_of, restores
from .test_sealed_whole import sealed_for


def test_two_directories_in_turn_are_refused(newest_rig: Rig, me: Pair) -> None:
    """Before anything of the first, which the second is built on, is removed."""
    rig = newest_rig
    with rig.job(mib=16) as job:
        first = dump(rig, job, sealed_for(me, layout="packed"))
        second = dump(rig, job, on_top_of(first, me, layout="packed"))
        for parent in (second, first):
            config = on_top_of(parent, me, layout="packed")
            log = refused(rig.dump(job, first, config=config))
            assert "would replace that: use another directory" in log
            job.run_on()
        last = dump(rig, job, on_top_of(second, me, layout="packed"), last=True)
        restores(rig, last, job, me)


LARGE = """import os, time
os.fork()
kept = bytearray(os.urandom(1 << 20) * 80)
print("filled", flush=True)
time.sleep(3600)
"""


def test_a_key_on_a_descriptor_is_read_once(newest_rig: Rig, me: Pair, tmp_path: Path) -> None:
    """With "auto" the parent is chosen anew for each process. By then the descriptor's number is
    that of another file. What is built on nothing has no link."""
    rig = newest_rig
    packed = sealed_for(me, layout="packed")
    with rig.job(mib=4) as job:
        first = dump(rig, job, packed)
    words = [sys.executable, "-c", LARGE]
    large = Job(words, tmp_path / "large.log", rig.environ)
    large.wait_for("filled", count=2)
    reading, writing = os.pipe()
    key_of(first, me).hand_on(writing)
    os.close(writing)
    config = packed | {"private_key": f"fd:{reading}", "parent": str(first)}
    config |= {"chunk_size": 8192, "cpu_memory": "auto"}
    images = rig.images()
    try:
        with (tmp_path / "output").open("wb") as output:
            done = subprocess.run(
                rig.dump_words(large, images),
                env=rig.environment(config),
                pass_fds=[reading],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=120,
                check=False,
            )
    finally:
        os.close(reading)
    log = log_path(images, "dump").read_text()
    assert done.returncode == 0, log[-2000:]
    why = f"is left to CRIU: chunk_size = 8192: the parent {first} has 4096"
    assert log.count(why) == 2, log[-2000:]
    assert not (images / PARENT_LINK).is_symlink()
    large.wait()
