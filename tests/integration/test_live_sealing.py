# SPDX-License-Identifier: Apache-2.0
"""A dump for recipients: what the plugin stores is sealed while it is stored, and only who has the
key restores it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaigns.rig import Rig
from campaigns.steady_job import SteadyJob
from gpustasis._core import FreshKey
from gpustasis.criu.plugin import Scalar
from support.certificates import Pair
from support.cpu_memory import OURS, refused, require_dead, running
from support.live_sealing import (
    gpustasis,
    key_of,
    opened_by,
    ours,
    require_nowhere,
    sealed_for,
)
from support.plain_sealed import open_directory
from support.recipients import DAY, make_recipient

MIB = 1 << 20


@pytest.mark.parametrize("kind", ["rsa", "SECP256R1"])
def test_there_and_back(rig: Rig, tmp_path: Path, kind: str) -> None:
    pair = make_recipient(tmp_path, "other", kind)
    with rig.job(mib=16, children=1) as job:
        images = rig.images()
        # The job has a copy of its GPU memory, which is CPU memory.
        dumped = rig.dump(job, images, config=sealed_for(pair, **OURS))
        assert dumped.status == 0, dumped.errors
        assert job.wait() == -signal.SIGKILL
        steps = job.steps()
        rig.settle(images)
        others = [f"gpustasis-sealed-{number}.img" for number in range(2, 6)]
        assert ours(images) == {"gpustasis-sealed.cms", "gpustasis-sealed.img", *others}
        require_nowhere(images, pair)
        restored = rig.restore(images, config=opened_by(pair))
        assert restored.status == 0, restored.errors
        job.run_on()
        assert job.steps() > steps


def test_cpu_memory_is_sealed_as_well(rig: Rig, memory_job: Path, me: Pair) -> None:
    with running(rig, memory_job, mib=40, criu_restores=True) as job:
        images = rig.images()
        dumped = rig.dump(job, images, config=sealed_for(me, compress="none", **OURS))
        assert dumped.status == 0, dumped.errors
        job.wait()
        require_nowhere(images, me)
        restored = rig.restore(images, config=opened_by(me))
        assert restored.status == 0, restored.errors
        job.run_on()


REFUSALS = {
    "a certificate that is not there": ({"recipients": ["/nowhere.pem"]}, "/nowhere.pem"),
    "without the risk": (
        {"risk": list[str](), "layout": "criu"},
        'name the risk "clear-images"',
    ),
    "with a parent and no key": ({"parent": "/"}, "with parent, private_key has to name"),
    "incremental and no key": ({"incremental": True}, "with incremental, private_key has to name"),
    "without images of ours": ({"externalize": False}, "needs externalize"),
    "relative": ({"recipients": ["me.pem"]}, "a list of absolute paths"),
}


@pytest.mark.parametrize(("keys", "said"), REFUSALS.values(), ids=REFUSALS.keys())
def test_what_cannot_be_sealed_is_refused_before_the_job_is_touched(
    newest_rig: Rig, me: Pair, keys: dict[str, Scalar], said: str
) -> None:
    with newest_rig.job(mib=4) as job:
        images = newest_rig.images()
        dumped = newest_rig.dump(job, images, config=sealed_for(me) | keys)
        assert said in refused(dumped)
        assert "locked pid" not in dumped.log
        assert ours(images) == set()
        job.run_on()


def test_a_certificate_that_is_not_fit_is_refused(newest_rig: Rig, tmp_path: Path) -> None:
    weak = make_recipient(tmp_path, "weak", "rsa1024")
    with newest_rig.job(mib=4) as job:
        dumped = newest_rig.dump(job, newest_rig.images(), config=sealed_for(weak))
        assert f"certificate {weak.certificate}" in refused(dumped)
        job.run_on()


def test_a_certificate_that_has_expired_is_warned_of(newest_rig: Rig, tmp_path: Path) -> None:
    old = make_recipient(tmp_path, "old", begin=-2 * DAY, end=-DAY)
    with newest_rig.job(mib=4) as job:
        images = newest_rig.images()
        dumped = newest_rig.dump(job, images, config=sealed_for(old))
        assert dumped.status == 0, dumped.errors
        assert f"certificate {old.certificate} has expired: " in dumped.log
        job.wait()
        assert newest_rig.restore(images, config=opened_by(old)).status == 0
        job.run_on()


def test_a_tree_with_nothing_to_seal_is_not_dumped(
    newest_rig: Rig, memory_job: Path, me: Pair
) -> None:
    with running(newest_rig, memory_job, mib=4, criu_restores=True) as job:
        images = newest_rig.images()
        log = refused(newest_rig.dump(job, images, config=sealed_for(me)))
        assert "nothing of this checkpoint would be encrypted" in log
        job.run_on()


@pytest.fixture
def ended(newest_rig: Rig, me: Pair) -> Iterator[tuple[SteadyJob, Path]]:
    """A job that a sealed dump has ended, and the checkpoint."""
    with newest_rig.job(mib=8, children=1) as job:
        images = newest_rig.images()
        dumped = newest_rig.dump(job, images, config=sealed_for(me))
        assert dumped.status == 0, dumped.errors
        job.wait()
        newest_rig.settle(images)
        yield job, images
        restored = newest_rig.restore(images, config=opened_by(me))
        assert restored.status == 0, restored.errors
        job.run_on()


def require_refused(rig: Rig, images: Path, said: str, **config: Scalar) -> None:
    log = refused(rig.restore(images, config=config))
    assert said in log, log[-2000:]
    assert "Forking task" not in log


def test_another_key_opens_nothing(
    newest_rig: Rig, ended: tuple[SteadyJob, Path], tmp_path: Path
) -> None:
    _, images = ended
    other = make_recipient(tmp_path, "other")
    require_refused(newest_rig, images, "for another key", **opened_by(other))
    require_refused(newest_rig, images, "names no private_key")
    require_refused(newest_rig, images, "/nowhere.key", private_key="/nowhere.key")
    other.key.chmod(0o644)
    require_refused(newest_rig, images, "mode 0600", **opened_by(other))


def test_a_key_comes_on_a_descriptor(rig: Rig, me: Pair) -> None:
    """From whoever has opened the envelope elsewhere; a restored job does not have it."""
    with rig.job(mib=8) as job:
        images = rig.images()
        assert rig.dump(job, images, config=sealed_for(me)).status == 0
        job.wait()
        for key, status in ((FreshKey().key, 1), (key_of(images, me), 0)):
            reading, writing = os.pipe()
            pipe = os.readlink(f"/proc/self/fd/{reading}")
            try:
                key.hand_on(writing)
                restored = subprocess.run(
                    rig.restore_words(images),
                    env=rig.environment({"private_key": f"fd:{reading}"}),
                    pass_fds=[reading],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=60,
                    check=False,
                )
            finally:
                os.close(writing)
                os.close(reading)
            assert restored.returncode == status
        job.run_on()
        assert pipe not in [os.readlink(path) for path in Path(f"/proc/{job.pid}/fd").iterdir()]


def test_what_was_changed_is_refused(
    newest_rig: Rig, ended: tuple[SteadyJob, Path], me: Pair
) -> None:
    """What says what there is, before anything is created; memory itself, before it is used."""
    job, images = ended
    for name in sorted(ours(images)):
        path = images / name
        content = path.read_bytes()
        for at in (3, 60, 140, len(content) - 200, len(content) - 5):
            changed = bytearray(content)
            changed[at] ^= 1
            path.write_bytes(changed)
            # Frame 0 of an image is the one with its header; the last before the end is the index.
            require_refused(newest_rig, images, name, **opened_by(me))
        if name in ("gpustasis-sealed-2.img", "gpustasis-sealed-3.img"):
            changed = bytearray(content)
            changed[2 * MIB] ^= 1
            path.write_bytes(changed)
            assert name in refused(newest_rig.restore(images, config=opened_by(me)))
            require_dead(job)
            job.reap()
        path.write_bytes(content)


def test_no_sealed_file_may_be_missing_or_added(
    newest_rig: Rig, ended: tuple[SteadyJob, Path], me: Pair
) -> None:
    _, images = ended
    for name in sorted(ours(images)):
        away = images / f"{name}.away"
        (images / name).rename(away)
        require_refused(newest_rig, images, name, **opened_by(me))
        away.rename(images / name)
    second, third = (images / f"gpustasis-sealed-{number}.img" for number in (2, 3))
    content = second.read_bytes()
    (images / "gpustasis-sealed-4.img").write_bytes(content)
    require_refused(newest_rig, images, "gpustasis-sealed-4.img is not listed", **opened_by(me))
    (images / "gpustasis-sealed-4.img").unlink()
    second.write_bytes(third.read_bytes())
    require_refused(newest_rig, images, "gpustasis-sealed-2.img: is file 3", **opened_by(me))
    second.write_bytes(content)
    (images / "gpustasis-manifest.img").write_bytes(b"")
    require_refused(newest_rig, images, "lies in the clear beside", **opened_by(me))
    (images / "gpustasis-manifest.img").unlink()


def test_files_of_another_dump_do_not_fit(newest_rig: Rig, me: Pair) -> None:
    """Two dumps of one job, for one recipient."""
    with newest_rig.job(mib=8) as job:
        first, second = newest_rig.images(), newest_rig.images()
        config = sealed_for(me)
        assert newest_rig.dump(job, first, "--leave-running", config=config).status == 0
        assert newest_rig.dump(job, second, config=config).status == 0
        job.wait()
        said = "the key is that of another sealed checkpoint"
        for name in sorted(ours(second)):
            mixed = newest_rig.copy(second)
            (mixed / name).write_bytes((first / name).read_bytes())
            require_refused(newest_rig, mixed, said, **opened_by(me))
        mixed = newest_rig.copy(second)
        for name in ours(second):
            (mixed / name).write_bytes((first / name).read_bytes())
        said = "is not the one that CRIU's images in this directory were made with"
        require_refused(newest_rig, mixed, said, **opened_by(me))
        assert newest_rig.restore(second, config=opened_by(me)).status == 0
        job.run_on()


def test_a_dump_replaces_what_an_earlier_one_has_left(newest_rig: Rig, me: Pair) -> None:
    with newest_rig.job(mib=8, children=1) as job:
        images = newest_rig.images()
        alive = "--leave-running"
        assert newest_rig.dump(job, images, alive, config=sealed_for(me)).status == 0
        assert newest_rig.dump(job, images, alive).status == 0
        assert not any("sealed" in name for name in ours(images))
        assert newest_rig.dump(job, images, config=sealed_for(me)).status == 0
        assert not (images / "gpustasis-manifest.img").exists()
        job.wait()
        assert newest_rig.restore(images, config=opened_by(me)).status == 0
        job.run_on()


def test_others_read_what_was_sealed(
    newest_rig: Rig, ended: tuple[SteadyJob, Path], me: Pair, tmp_path: Path
) -> None:
    """A reader written from docs/format.md alone, and openssl for the envelope."""
    _, images = ended
    files = {file.name.decode(): file for file in open_directory(images, me.key)}
    out = tmp_path / "out"
    done = gpustasis(newest_rig, "unseal", images, "--key", me.key, "-o", out)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == {
        path.name for path in images.iterdir() if path.name not in ours(images)
    } | files.keys()
    for name, file in files.items():
        assert (out / name).read_bytes() == file.content
        assert file.mode == 0o600
    record = subprocess.run(
        ["openssl", "cms", "-decrypt", "-inform", "DER", "-inkey", str(me.key)],
        input=(images / "gpustasis-sealed.cms").read_bytes(),
        capture_output=True,
        check=True,
        timeout=30,
    ).stdout
    assert len(record) == 64
    assert record[:8] == b"GPUSKEY\n"
    assert gpustasis(newest_rig, "verify", out).returncode == 0
    for command in ("verify", "inspect"):
        assert "is sealed" in gpustasis(newest_rig, command, images).stderr


def test_what_is_sealed_is_given_to_others(
    newest_rig: Rig, ended: tuple[SteadyJob, Path], me: Pair, tmp_path: Path
) -> None:
    _, images = ended
    other = make_recipient(tmp_path, "other", "SECP384R1")
    words = ["rewrap", images, "--key", me.key, "--to", other.certificate, "--to", me.certificate]
    done = gpustasis(newest_rig, *words)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    done = gpustasis(newest_rig, "unseal", images, "--key", other.key, "-o", out)
    assert done.returncode == 0, done.stderr
    (images / "gpustasis-sealed-3.img").rename(tmp_path / "away")
    for refusing in (words, ["unseal", images, "--key", me.key, "-o", tmp_path / "no"]):
        failed = gpustasis(newest_rig, *refusing)
        assert "gpustasis-sealed-3.img" in failed.stderr
        assert failed.returncode != 0
    (tmp_path / "away").rename(images / "gpustasis-sealed-3.img")
