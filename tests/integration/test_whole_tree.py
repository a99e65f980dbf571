# SPDX-License-Identifier: Apache-2.0
"""A tree of fifty processes with threads, shared memory, memfds, pipes, files without a name, heaps
that are shared until somebody writes, and CUDA comes back to the bit, however it was checkpointed.
The job checks itself; it notices each thing that is wrong, also one byte in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from campaigns.rig import Rig
from campaigns.whole_trees import round_trip
from support.certificates import Pair
from support.elsewhere import Elsewhere
from support.whole_tree import (
    CUDA_PROCESSES,
    FLAGS,
    PROGRAM,
    WAYS,
    WRONG_IN,
    WRONGS,
    chosen,
    numbers_of,
    whole_tree,
)

FIRST_OF_OURS = 256  # low_descriptors.hpp
SOME_WRONGS = (
    *("heap", "cow-mapping", "memfd-unshared", "ghost-on-disk", "gpu", "pipe"),
    *("one-descriptor-of-two", "thread-gone"),
)


@pytest.fixture(scope="module")
def program(compile_cuda: Callable[..., Path]) -> Path:
    return compile_cuda(PROGRAM, *FLAGS)


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Elsewhere]:
    with Elsewhere() as found:
        yield found


@pytest.mark.one_criu
@pytest.mark.parametrize("way", chosen(WAYS, ["packed-ours"]))
def test_there_and_back(rig: Rig, program: Path, elsewhere: Elsewhere, me: Pair, way: str) -> None:
    with whole_tree(program, rig.scratch, rig.environ) as job:
        round_trip(rig, job, WAYS[way], elsewhere, me)


@pytest.mark.parametrize("way", ["plain", "streamed", "sealed-incremental", "sealed-streamed"])
def test_with_the_newest_criu(
    newest_rig: Rig, program: Path, elsewhere: Elsewhere, me: Pair, way: str
) -> None:
    with whole_tree(program, newest_rig.scratch, newest_rig.environ) as job:
        round_trip(newest_rig, job, WAYS[way], elsewhere, me)


@pytest.mark.parametrize("wrong", chosen(WRONGS, SOME_WRONGS))
def test_the_job_notices(
    program: Path, tmp_path: Path, emulator_environ: dict[str, str], wrong: str
) -> None:
    """What a restore could make wrong of it."""
    where = CUDA_PROCESSES[-1] if wrong == "gpu" else WRONG_IN
    words = {"wrong": wrong, "wrong_in": where, "cuda": int(wrong == "gpu")}
    with (
        pytest.raises(AssertionError, match=f"WRONG {WRONGS[wrong]} process "),
        whole_tree(program, tmp_path, emulator_environ, **words) as job,
    ):
        job.run_on()


def flip_a_byte_of(images: Path, memory: str) -> None:
    """Of one page of it, in CRIU's images."""
    needle = numbers_of(memory, page=16)
    (path,) = [path for path in images.glob("pages-*.img") if needle in path.read_bytes()]
    content = bytearray(path.read_bytes())
    assert content.count(needle) == 1
    content[content.index(needle)] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("place", ["private", "shared"])
def test_the_job_notices_one_byte_of_criu_that_is_wrong(
    newest_rig: Rig, program: Path, place: str
) -> None:
    """CRIU's images have no checksum: it restores what they hold."""
    with whole_tree(program, newest_rig.scratch, newest_rig.environ, cuda=0) as job:
        images = newest_rig.images()
        assert newest_rig.dump(job, images, plugin=False).status == 0
        job.wait()
        flip_a_byte_of(images, place)
        restored = newest_rig.restore(images, plugin=False)
        # On a busy machine a process may notice, and end, before criu has let go of it.
        assert restored.status == 0 or "Unable to detach" in restored.errors, restored.errors
        with pytest.raises(AssertionError, match=f"WRONG {place} process "):
            job.run_on()


def test_criu_keeps_the_low_descriptors_in_a_restore(rig: Rig) -> None:
    """In each task criu moves its own to the end of the first 128, over whatever lies there."""
    seen, script = rig.scratch / "seen", rig.scratch / "script"
    script.write_text(
        f'#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-restore ] || ls -l /proc/$PPID/fd >{seen}\n'
    )
    script.chmod(0o755)
    with rig.job(mib=8, children=1) as job:
        images = rig.images()
        assert rig.dump(job, images, config={"cpu_memory": "ours"}).status == 0
        job.wait()
        restored = rig.restore(images, "--action-script", str(script))
        assert restored.status == 0, restored.errors
        job.run_on()
    links = [line.split()[-3:] for line in seen.read_text().splitlines() if " -> " in line]
    ours = [int(number) for number, _, path in links if "/gpustasis-" in path]
    assert len(ours) >= 4 and min(ours) >= FIRST_OF_OURS
