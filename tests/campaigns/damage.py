# SPDX-License-Identifier: Apache-2.0
"""Our files of a checkpoint are damaged: a restore must refuse, or kill all that it has made.

Whatever happens, criu's exit status says so, its log has a reason of the plugin's, no process of
the tree is left alive, and the job has not made a single step on memory that may be wrong.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from campaigns.rig import Rig
from campaigns.steady_job import SteadyJob
from campaigns.tally import Tally
from gpustasis._core import MANIFEST_NAME
from gpustasis.criu.plugin import Setting

_DEATH_S = 10.0  # a process that was killed may take a moment to be gone

Damage = Callable[[Path], str]  # changes an image directory and says what it did


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A job that was dumped and is gone, and its images."""

    job: SteadyJob
    images: Path


def take(rig: Rig, environ: Mapping[str, str] | None = None, **options: int | str) -> Checkpoint:
    """environ: of the job; None: the rig's."""
    name = rig.images().name + "-job"
    job = SteadyJob(rig.programs.job, rig.scratch / name, environ or rig.environ, **options)
    try:
        images = rig.images()
        dumped = rig.dump(job, images)
        assert dumped.status == 0, dumped.errors
        assert job.wait() == -signal.SIGKILL
    except BaseException:
        job.end()
        raise
    rig.settle(images)
    return Checkpoint(job, images)


def run(rig: Rig, random: Random, flips: int, cuts: int) -> Tally:
    """`flips` restores with one bit of one of our files flipped, `cuts` with one cut short, and
    one with each of the files missing or empty; then one of the undamaged checkpoint."""
    tally = Tally()
    checkpoint = take(rig, mib=2, children=1)
    names = sorted(path.name for path in checkpoint.images.glob("gpustasis-*.img"))
    damages: list[Damage] = [missing(name) for name in names]
    damages += [cut(name, 0) for name in names]
    damages += [_flip_somewhere(random, names, index) for index in range(flips)]
    damages += [_cut_somewhere(random, names[index % len(names)]) for index in range(cuts)]
    refuse_all(rig, checkpoint, damages, tally)
    restored = rig.restore(checkpoint.images)
    assert restored.status == 0, f"undamaged, and not restored: {restored.errors}"
    checkpoint.job.run_on()
    checkpoint.job.end()
    return tally


def refuse_all(
    rig: Rig,
    checkpoint: Checkpoint,
    damages: Sequence[Damage],
    tally: Tally,
    *,
    by_criu: Collection[Damage] = (),
) -> None:
    """A restore of a copy with each of them. by_criu: those of them that CRIU may refuse, as of
    expect_refusal."""
    for damage in damages:
        images = rig.copy(checkpoint.images)
        what = damage(images)
        tally.counts["trials"] += 1
        try:
            refused = expect_refusal(rig, checkpoint.job, images, by_criu=damage in by_criu)
            tally.counts[refused] += 1
        except AssertionError as failure:
            tally.failures.append(f"{what}: {failure}")
            checkpoint.job.end()
        shutil.rmtree(images)


def expect_refusal(
    rig: Rig,
    job: SteadyJob,
    images: Path,
    config: Mapping[str, Setting] | None = None,
    *,
    by_criu: bool = False,
) -> str:
    """Restore; it must not come to anything. Says how it was refused. by_criu: CRIU may refuse it
    before it asks a plugin, and give a reason of its own."""
    output = job.log.read_bytes()
    restored = rig.restore(images, config=config)
    deadline = time.monotonic() + _DEATH_S
    while job.alive_pids() and time.monotonic() < deadline:
        time.sleep(0.01)
    job.reap()  # what was killed has come to us
    assert restored.status != 0, "criu says it restored this"
    reasons = [
        line for line in restored.log.splitlines() if "Error (gpustasis): cuda_plugin: " in line
    ]
    if by_criu and not reasons:
        assert "Error (" in restored.log + restored.output, "criu gives no reason"
    else:
        assert reasons, f"no reason in criu's log: {restored.errors}"
    alive = job.alive_pids()
    assert not alive, f"{alive} live"
    assert job.log.read_bytes() == output, "the job has made steps"
    rig.settle(images)
    if not reasons:
        assert "Forking task" not in restored.log, "criu had made tasks when it refused"
        return "refused by CRIU itself"
    made = "every restored task was killed" in restored.log
    return "killed what was made" if made else "refused before anything was made"


def missing(name: str) -> Damage:
    def damage(images: Path) -> str:
        (images / name).unlink()
        return f"{name} missing"

    return damage


def cut(name: str, size: int) -> Damage:
    def damage(images: Path) -> str:
        with (images / name).open("r+b") as file:
            file.truncate(size)
        return f"{name} cut to {size} bytes"

    return damage


def _cut_somewhere(random: Random, name: str) -> Damage:
    def damage(images: Path) -> str:
        size = (images / name).stat().st_size
        near_end = random.random() < 0.5
        return cut(name, size - random.randint(1, 64) if near_end else random.randrange(size))(
            images
        )

    return damage


def _flip_somewhere(random: Random, names: list[str], index: int) -> Damage:
    """In turn: anywhere in an image, in its first or last kilobyte, anywhere in the manifest."""

    def damage(images: Path) -> str:
        pictures = [name for name in names if name != MANIFEST_NAME]
        name = MANIFEST_NAME if index % 4 == 3 else random.choice(pictures)
        raw = bytearray((images / name).read_bytes())
        low, high = {
            1: (0, min(1024, len(raw))),
            2: (max(0, len(raw) - 1024), len(raw)),
        }.get(index % 4, (0, len(raw)))
        offset, bit = random.randrange(low, high), random.randrange(8)
        raw[offset] ^= 1 << bit
        (images / name).write_bytes(raw)
        return f"bit {bit} of byte {offset} of {len(raw)} of {name} flipped"

    return damage
