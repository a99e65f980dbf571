# SPDX-License-Identifier: Apache-2.0
"""Streams of sealed checkpoints, with real CRIU: who has the key restores, nobody else reads."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from campaigns import large_streams, streams
from campaigns.rig import Rig
from campaigns.stream_faults import Fault
from campaigns.streams import JOB
from campaigns.tally import Tally
from gpustasis.criu.plugin import Scalar
from gpustasis.streaming import sealed
from gpustasis.streaming.records import SEALED, Kind
from support.certificates import Pair
from support.elsewhere import Elsewhere
from support.json_output import check_document
from support.live_sealing import needles
from support.recipients import make_recipient
from support.streams import stream_of

SEED = 11
SHAPE = {"mib": 8, "children": 1}


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Elsewhere]:
    with Elsewhere() as found:
        yield found


def run(
    rig: Rig, *words: object, config: dict[str, Scalar] | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    found = rig.environment(config) | {"GPUSTASIS_CRIU": str(rig.criu.root or rig.criu.program)}
    return subprocess.run(
        [sys.executable, "-m", "gpustasis", *map(str, words)],
        env=found | environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def require_nowhere(place: Path, wanted: list[bytes]) -> None:
    """No file below that place holds any of these."""
    assert wanted
    found = [path for path in place.rglob("*") if path.is_file()]
    assert found
    for path in found:
        content = path.read_bytes()
        assert not any(needle in content for needle in wanted), path


def test_to_another_machine(rig: Rig, elsewhere: Elsewhere, me: Pair) -> None:
    tally = Tally()
    whole = streams.send(rig, elsewhere, Fault(), pair=me, **SHAPE)
    assert (whole.place / "in/gpustasis-sealed-2.img").exists()  # GPU memory has gone ahead
    streams.judge(rig, elsewhere, Fault(), whole, tally)
    tally.require_clean()
    assert tally.counts["runs there"] == 1, whole.said


def test_nothing_in_the_clear_is_at_either_end(
    newest_rig: Rig, elsewhere: Elsewhere, me: Pair
) -> None:
    """Where both ends keep what they have."""
    tally, fault = Tally(), Fault("unreleased")
    lost = streams.send(newest_rig, elsewhere, fault, pair=me, **SHAPE)
    assert {path.parent.name for path in lost.named} == {"spool", lost.place.name}
    for images in lost.named:
        require_nowhere(images, needles(images, me))
    streams.judge(newest_rig, elsewhere, fault, lost, tally)  # restored from one of the two
    tally.require_clean()
    assert tally.counts["ended, and a checkpoint is named"] == 1


def test_a_sealed_stream_that_breaks_leaves_one_job(newest_rig: Rig, me: Pair) -> None:
    streams.run(newest_rig, Random(SEED), 6, pair=me).require_clean()


def test_who_has_no_key_is_not_sent_anything(
    newest_rig: Rig, elsewhere: Elsewhere, me: Pair
) -> None:
    found = streams.send(newest_rig, elsewhere, Fault(), pair=me, opens=(), **SHAPE)
    assert (found.sender, found.here, found.there) == (18, 2, 0)
    assert found.forward == 0
    assert "nothing was frozen: the job was not touched" in found.said
    assert "it was given no key" in found.said
    found.job.run_on()
    found.job.end()
    assert not (found.place / "in").exists()


def test_another_key_is_refused_while_the_job_stands(
    newest_rig: Rig, elsewhere: Elsewhere, me: Pair, tmp_path: Path
) -> None:
    """By the envelope alone, which comes first."""
    other = make_recipient(tmp_path, "other")
    opens = ("--key", str(other.key))
    found = streams.send(newest_rig, elsewhere, Fault(), pair=me, opens=opens, **SHAPE)
    assert (found.sender, found.receiver, found.here, found.there) == (18, 14, 2, 0)
    assert "for another key" in found.said
    assert "the job runs on" in found.said
    assert not found.was_ready
    assert found.forward < 4 << 20
    left = [*found.place.glob("in"), *found.place.glob(".in.part"), *found.place.glob("spool/*")]
    assert not left
    found.job.run_on()
    found.job.end()


def test_a_key_command_that_takes_longer_than_a_stream_may_stand_still(
    newest_rig: Rig, elsewhere: Elsewhere, me: Pair
) -> None:
    """There is more to come than fits on the way."""
    tally, fault = Tally(), Fault()
    opens = f"sleep 20; exec openssl cms -decrypt -inform DER -inkey {shlex.quote(str(me.key))}"
    command = ("--key-command", shlex.join(("sh", "-c", opens)))
    slow = ("--stall-timeout", "10")
    found = streams.send(newest_rig, elsewhere, fault, slow, pair=me, opens=command, mib=32)
    assert found.forward > 8 << 20
    streams.judge(newest_rig, elsewhere, fault, found, tally)
    tally.require_clean()
    assert tally.counts["runs there"] == 1, found.said


def test_a_key_that_opens_nothing_is_spoken_of(newest_rig: Rig, me: Pair, tmp_path: Path) -> None:
    """But the one that the configuration names for others, too."""
    rig, file, said = newest_rig, tmp_path / "job.gps", "is not sealed: the key was not used"
    with rig.job(**SHAPE) as job:
        done = run(rig, "checkpoint", job.pid, "-o", file, "--spool", tmp_path / "spool")
        assert done.returncode == 0, done.stderr
        job.wait()
        named: tuple[object, ...] = ("--key", me.key)
        into = tmp_path / "in"
        for words, config, spoken_of in (
            (("-i", file, "-D", into, *named), None, True),
            (("-i", file), {"private_key": str(me.key)}, False),
            (("-D", into, *named), None, True),
        ):
            done = run(rig, "restore", *words, config=config)
            assert done.returncode == 0, done.stderr
            assert (said in done.stderr) == spoken_of, done.stderr
            job.run_on()
            if words[0] == "-i":
                job.end()


def test_a_job_without_gpu_that_is_left_stopped(newest_rig: Rig, me: Pair, tmp_path: Path) -> None:
    """What it holds is sealed; it ended for this."""
    rig, file = newest_rig, tmp_path / "job.gps"
    with rig.job(mib=8, cuda=0) as job:
        words = ("-o", file, "--spool", tmp_path / "spool", "--to", me.certificate)
        done = run(rig, "checkpoint", job.pid, *words, "--cpu-memory", "ours")
        assert done.returncode == 0, done.stderr
        job.wait()
        stopped = ("-D", tmp_path / "in", "--leave-stopped")
        done = run(rig, "restore", "-i", file, *stopped, "--key", me.key)
        assert done.returncode == 0, done.stderr
        assert "is stopped" in done.stdout
        job.end()
        refused = run(rig, "restore", *stopped)
        assert (refused.returncode, "name its key with --key" in refused.stderr) == (14, True)
        done = run(rig, "restore", *stopped, "--key", me.key)
        assert done.returncode == 0, done.stderr
        os.kill(job.pid, signal.SIGCONT)
        job.run_on()


def test_to_a_file_and_back(newest_rig: Rig, me: Pair, tmp_path: Path) -> None:
    """By the configuration, a command that has the key, and what a person says."""
    rig, file, spool = newest_rig, tmp_path / "job.gps", tmp_path / "spool"
    names: dict[str, Scalar] = {"recipients": [str(me.certificate)]}  # type: ignore[dict-item]
    opens: dict[str, Scalar] = {"private_key": str(me.key)}
    program = ("openssl", "cms", "-decrypt", "-inform", "DER", "-inkey", str(me.key))
    with rig.job(**SHAPE) as job:
        environ = Path(f"/proc/{job.pid}/environ").read_bytes()[:64]
        words = ("checkpoint", job.pid, "-o", file, "--spool", spool)
        done = run(rig, *words, "-R", "--to", me.certificate)
        assert done.returncode == 0, done.stderr
        stream = file.read_bytes()
        assert environ not in stream
        file.unlink()
        done = run(rig, *words, "--json", config=names)
        assert done.returncode == 0, done.stderr
        check_document(done.stdout, "checkpoint")
        job.wait()
        assert environ not in file.read_bytes()
        into = tmp_path / "in"
        without = run(rig, "restore", "-i", file, "-D", into)
        assert (without.returncode, "there is no key: --key" in without.stderr) == (14, True)
        other = make_recipient(tmp_path, "other")
        wrong = run(rig, "restore", "-i", file, "-D", into, "--key", other.key)
        assert (wrong.returncode, "for another key" in wrong.stderr) == (14, True)
        assert not into.exists() and not list(tmp_path.glob(".in*"))
        done = run(rig, "restore", "-i", file, "-D", into, "--key-command", shlex.join(program))
        assert done.returncode == 0, done.stderr
        require_nowhere(into, needles(into, me))
        job.run_on()
        job.end()
        done = run(rig, "restore", "-i", file, config=opens)
        assert done.returncode == 0, done.stderr
        job.run_on()
        job.end()
        shutil.copytree(into, tmp_path / "copy")
        done = run(rig, "restore", "-D", into, "--key-command", shlex.join(program))
        assert done.returncode == 0, done.stderr
        job.run_on()


def test_what_somebody_changed_who_makes_the_hashes_right(
    newest_rig: Rig, me: Pair, tmp_path: Path
) -> None:
    """Found before the sender would end its job, by the key alone; criu is not started."""
    rig, file, images = newest_rig, tmp_path / "job.gps", tmp_path / "images"
    random = Random(SEED)

    def restore(files: dict[str, bytes], *words: object) -> subprocess.CompletedProcess[str]:
        file.write_bytes(stream_of(files, Kind.RELEASED, required_features=SEALED))
        return run(rig, "restore", "-i", file, "-D", tmp_path / "in", "--key", me.key, *words)

    with rig.job(**SHAPE) as job:
        words = ("-D", images, "--to", me.certificate, "--cpu-memory", "ours")
        done = run(rig, "checkpoint", job.pid, *words)
        assert done.returncode == 0, done.stderr
        job.wait()
        sent = [path for path in images.iterdir() if path.suffix in (".img", ".cms")]
        order = [path.name for path in sealed.in_order(sent) if "stats" not in path.name]
        files = {name: (images / name).read_bytes() for name in order}
        assert {f"gpustasis-sealed-{number}.img" for number in (2, 3, 4, 5)} <= files.keys()
        for name in (one for one in files if one.startswith("gpustasis-sealed")):
            for _ in range(2):
                changed = bytearray(content := files[name])
                changed[random.randrange(len(content))] ^= 1
                refused = restore(files | {name: bytes(changed)})
                assert refused.returncode in (14, 18), (name, refused.stderr)
                assert "restore failed" not in refused.stderr
                assert not (tmp_path / "in").exists() and not job.alive_pids()
        refused = restore(files, "--leave-stopped")
        assert (refused.returncode, "the job has GPU state" in refused.stderr) == (18, True)
        done = restore(files)
        assert done.returncode == 0, done.stderr
        job.run_on()


def test_a_dump_that_seals_for_others_than_is_known_here(
    newest_rig: Rig, me: Pair, tmp_path: Path
) -> None:
    """Told to criu alone: the stream would not say that it is sealed."""
    rig, spool = newest_rig, tmp_path / "spool"
    option = f"--plugin-option=cuda_plugin.recipients={me.certificate}"
    with rig.job(**SHAPE) as job:
        words = ("checkpoint", job.pid, "-o", tmp_path / "out", "--spool", spool, "--", option)
        done = run(rig, *words)
        assert done.returncode == 18, done.stderr
        assert "in a stream that does not say so" in done.stderr
        assert list(spool.iterdir()) == []
        assert not (tmp_path / "out").exists()
        job.run_on()


def test_memory_of_both_ends_does_not_grow_with_the_job(
    newest_rig: Rig, elsewhere: Elsewhere, me: Pair
) -> None:
    tally = large_streams.run(newest_rig, elsewhere, large_streams.SHORT_MIB, me)
    tally.require_clean()
    assert tally.counts["MiB sent"] > large_streams.MOST_MIB


def test_migrate(newest_rig: Rig, elsewhere: Elsewhere, me: Pair, tmp_path: Path) -> None:
    enter = shlex.join(elsewhere.words(()))
    (tmp_path / "ssh").write_text(f'#!/bin/sh\nfor last; do :; done\nexec {enter} sh -c "$last"\n')
    (tmp_path / "ssh").chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    with newest_rig.job(**SHAPE) as job:
        words = ("migrate", "--to", me.certificate, "--spool", tmp_path / "spool", job.pid, "gpu2")
        refused = run(newest_rig, *words, PATH=path)
        assert (refused.returncode, "it was given no key" in refused.stderr) == (18, True)
        job.run_on()
        done = run(newest_rig, *words, "--key", me.key, "-D", tmp_path / "in", PATH=path)
        assert done.returncode == 0, done.stderr
        assert len(elsewhere.jobs(JOB)) == 2
        assert (tmp_path / "in/gpustasis-sealed.img").exists()
        job.run_on_elsewhere()
        elsewhere.end_jobs(JOB)
