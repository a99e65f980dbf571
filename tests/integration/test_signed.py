# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are signed while they are made, with real CRIU: what is not as it was signed, by
one who is trusted, is refused before anything is made; a dump that cannot sign harms nobody."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from campaigns.rig import Rig, log_path
from campaigns.steady_job import SteadyJob
from gpustasis.criu.plugin import Scalar
from gpustasis.sealing.signing import SignerFile, sign, verify_signed
from support.certificates import Pair
from support.container import container
from support.cpu_memory import OURS, refused, running
from support.recipients import DAY, make_recipient
from support.signatures import SIGNATURE, STATEMENT, digest_of, make_signer, require_signed

from .test_containers import ask, contained
from .test_sealed_streams import run

LAYOUTS = ["criu", "packed", "sealed"]
SMALL: dict[str, Scalar] = {"chunk_size": 4096}
INVENTORY = "inventory.img"
FILES, SEALED = "gpustasis-files.img", "gpustasis-sealed.img"


@pytest.fixture
def signer(tmp_path: Path) -> Pair:
    return make_signer(tmp_path)


def signed_by(pair: Pair, **more: Scalar) -> dict[str, Scalar]:
    return {"sign": str(pair.key), "sign_certificate": str(pair.certificate), **SMALL, **more}


def trusting(*pairs: Pair, **more: Scalar) -> dict[str, Scalar]:
    return {"trusted": [str(pair.certificate) for pair in pairs], **more}


def laid_out(layout: str, me: Pair) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
    """What a dump and a restore are told."""
    if layout != "sealed":
        return {"layout": layout}, {}
    return {"recipients": [str(me.certificate)]}, {"private_key": str(me.key)}


def dump(rig: Rig, job: SteadyJob, config: dict[str, Scalar], *, last: bool = True) -> Path:
    images = rig.images()
    dumped = rig.dump(job, images, *(() if last else ("--leave-running",)), config=config)
    assert dumped.status == 0, dumped.errors
    if last:
        assert job.wait() == -signal.SIGKILL
    else:
        job.run_on()
    rig.settle(images)
    return images


def require_refused(
    rig: Rig, images: Path, job: SteadyJob, said: str, config: dict[str, Scalar]
) -> None:
    """Before anything is made."""
    log = refused(rig.restore(images, config=config))
    assert said in log, log[-2000:]
    assert "Forking task" not in log
    assert not job.alive_pids()


def require_restored(rig: Rig, images: Path, job: SteadyJob, config: dict[str, Scalar]) -> None:
    restored = rig.restore(images, config=config)
    assert restored.status == 0, restored.errors
    job.run_on()


def flip(path: Path, at: int | None = None) -> None:
    """at: None: in the middle. There a signature has the certificate, and a trusted one counts."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_file_counts(rig: Rig, signer: Pair, me: Pair, layout: str) -> None:
    told, opened = laid_out(layout, me)
    config = trusting(signer, **opened)
    with rig.job(mib=2, children=1) as job:
        images = dump(rig, job, signed_by(signer, **told))
        statement = require_signed(images, signer.certificate)
        left = {path.name for path in images.iterdir()} - set(statement.files)
        assert {STATEMENT, SIGNATURE} < left
        assert {name for name in left if name.endswith(".img")} == set()
        # Enough of the long ones, and of each kind of the short ones.
        for name in [*sorted(statement.files)[::4], INVENTORY, STATEMENT, SIGNATURE]:
            damaged = rig.copy(images)
            if not (damaged / name).stat().st_size:
                continue
            flip(damaged / name, -1 if name == SIGNATURE else None)
            log = refused(rig.restore(damaged, config=config))
            assert "Forking task" not in log, name
        for name, said in (("pages-99.img", "was added"), ("core-1.img", "was added")):
            damaged = rig.copy(images)
            (damaged / name).touch()
            require_refused(rig, damaged, job, said, config)
        damaged = rig.copy(images)
        gone = next(name for name in statement.files if name.startswith("gpustasis-"))
        (damaged / gone).unlink()
        require_refused(rig, damaged, job, f"{gone} is missing", config)
        require_restored(rig, images, job, config)


def test_who_is_believed(newest_rig: Rig, signer: Pair, tmp_path: Path) -> None:
    rig, other = newest_rig, make_signer(tmp_path, "other")
    with rig.job(mib=2) as job:
        images = dump(rig, job, signed_by(signer))
        require_refused(rig, images, job, "who is not trusted", trusting(other))
        for name in (SIGNATURE, STATEMENT):
            bare = rig.copy(images)
            (bare / name).unlink()
            require_refused(rig, bare, job, "it is not signed", trusting(signer))
        require_refused(
            rig, images, job, "trusted: certificate", {"trusted": [str(tmp_path / "nobody.pem")]}
        )
        require_restored(rig, images, job, trusting(other, signer))
    with rig.job(mib=2) as job:  # nobody has signed it
        images = dump(rig, job, SMALL)
        require_refused(rig, images, job, "it is not signed", trusting(signer))
        require_restored(rig, images, job, SMALL)


def test_an_expired_certificate_is_told(newest_rig: Rig, tmp_path: Path) -> None:
    rig = newest_rig
    old = make_signer(tmp_path, "old", begin=-2 * DAY, end=-DAY)
    with rig.job(mib=2) as job:
        images = rig.images()
        dumped = rig.dump(job, images, config=signed_by(old))
        assert dumped.status == 0 and "has expired: it was valid until 20" in dumped.errors
        job.wait()
        restored = rig.restore(images, config=trusting(old))
        assert restored.status == 0 and "has expired: it was valid until 20" in restored.log
        job.run_on()


def test_where_others_can_write(newest_rig: Rig, signer: Pair) -> None:
    rig = newest_rig
    with rig.job(mib=2) as job:
        images = dump(rig, job, signed_by(signer))
        pages = next(images.glob("pages-*.img"))
        for path, mode in ((images, 0o770), (pages, 0o666)):
            before = path.stat().st_mode & 0o777
            path.chmod(mode)
            require_refused(rig, images, job, "others can write there", trusting(signer))
            path.chmod(before)
        require_restored(rig, images, job, trusting(signer))


def test_a_tree_without_cuda(rig: Rig, signer: Pair, memory_job: Path) -> None:
    """Nothing of it is this plugin's, and all of it is signed."""
    with running(rig, memory_job, mib=2, criu_restores=True) as job:
        images = rig.images()
        dumped = rig.dump(job, images, config=signed_by(signer))
        assert dumped.status == 0, dumped.errors
        job.wait()
        assert "gpustasis-manifest.img" not in require_signed(images, signer.certificate).files
        damaged = rig.copy(images)
        flip(next(damaged.glob("pages-*.img")))
        require_refused(rig, damaged, job, "is not the file that was signed", trusting(signer))
        require_restored(rig, images, job, trusting(signer))


@pytest.mark.parametrize("layout", ["criu", "sealed"])
def test_a_chain(rig: Rig, signer: Pair, me: Pair, layout: str) -> None:
    told, opened = laid_out(layout, me)
    config = trusting(signer, **opened)
    with rig.job(mib=8) as job:
        chain = [dump(rig, job, signed_by(signer, **told, **OURS), last=False)]
        for last in (False, True):
            more = told | opened | OURS | {"parent": str(chain[-1])}
            chain.append(dump(rig, job, signed_by(signer, **more), last=last))
        for images, parent in zip(chain[1:], chain, strict=False):
            stated = require_signed(images, signer.certificate).parent
            assert stated == digest_of(parent / STATEMENT)
        assert len(verify_signed(chain[2], [signer.certificate])) == 3

        def require_noticed(said: str, change: Callable[[Path], object], at: int) -> None:
            kept = shutil.copytree(chain[at], chain[at].with_name("kept"), symlinks=True)
            change(chain[at])
            require_refused(rig, chain[2], job, said, config)
            shutil.rmtree(chain[at])
            kept.rename(chain[at])

        image = max(chain[0].glob("gpustasis-*.img"), key=lambda path: path.stat().st_size)
        require_noticed("is not the file that was signed", lambda d: flip(d / image.name), 0)
        require_noticed("was added", lambda d: (d / "gpustasis-99.img").touch(), 1)
        require_noticed("it is not signed", lambda d: (d / SIGNATURE).unlink(), 1)
        require_noticed(
            "another one, or an older one",
            lambda d: (
                (d / "new").touch(),
                sign(d, SignerFile(signer.key, signer.certificate)),
            ),
            1,
        )
        require_restored(rig, chain[2], job, config)


@pytest.mark.parametrize("layout", ["criu", "sealed"])
def test_a_container_whose_image_directories_the_engine_deletes(
    newest_rig: Rig, signer: Pair, me: Pair, layout: str
) -> None:
    """What others are built on is kept with its signature, and without CRIU's images."""
    rig = newest_rig
    told, opened = laid_out(layout, me)
    config = signed_by(signer, **told, **opened)
    with container() as made, contained(rig, made, mib=8) as job:
        ask(made, job, incremental="true")
        for _ in range(2):
            shutil.rmtree(dump(rig, job, config, last=False))
        last = dump(rig, job, config)
        assert len(verify_signed(last, [signer.certificate])) == 3
        kept = (last / "gpustasis-parent").resolve()
        assert not list(kept.glob("pages-*.img"))
        image = max(kept.glob("gpustasis-*.img"), key=lambda path: path.stat().st_size)
        flip(image)
        told = trusting(signer, **opened)
        require_refused(rig, last, job, f"{image.name} is not the file that was signed", told)
        flip(image)
        require_restored(rig, last, job, told)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stream(newest_rig: Rig, signer: Pair, me: Pair, tmp_path: Path, layout: str) -> None:
    rig, file, place = newest_rig, tmp_path / "job.gps", tmp_path / "in"
    told, opened = laid_out(layout, me)
    other = make_signer(tmp_path, "other")
    with rig.job(mib=4, children=1) as job:
        words = ("checkpoint", job.pid, "-o", file)
        done = run(rig, *words, config=signed_by(signer, **told))
        assert done.returncode == 0, done.stderr
        job.wait()
        restore = ("restore", "-i", file, "-D", place)
        refused = run(rig, *restore, config=trusting(other, **opened))
        assert refused.returncode == 14 and "who is not trusted" in refused.stderr, refused.stderr
        assert not place.exists() and not job.alive_pids()
        done = run(rig, *restore, config=trusting(signer, **opened))
        assert done.returncode == 0, done.stderr
        require_signed(place, signer.certificate)
        job.run_on()


def test_a_parent_that_nobody_has_signed(newest_rig: Rig, signer: Pair) -> None:
    rig = newest_rig
    with rig.job(mib=2) as job:
        parent = dump(rig, job, SMALL, last=False)
        images = rig.images()
        dumped = rig.dump(job, images, config=signed_by(signer, parent=str(parent)))
        assert dumped.status != 0 and "is not signed" in dumped.errors, dumped.errors
        job.run_on()


def test_a_dump_that_cannot_sign_harms_nobody(
    newest_rig: Rig, signer: Pair, tmp_path: Path
) -> None:
    rig, other = newest_rig, make_signer(tmp_path, "other")
    cases: dict[str, dict[str, Scalar]] = {
        "not the certificate of": signed_by(signer, sign_certificate=str(other.certificate)),
        "cannot open the private key": signed_by(signer, sign=str(tmp_path / "none.key")),
        "no certificate beside": {"sign": str(signer.key)},
        "absolute path of a private key": {"sign": "signer.key"},
        "Ed25519": {
            "sign": str((edwards := make_recipient(tmp_path, "ed", "ed25519")).key),
            "sign_certificate": str(edwards.certificate),
        },
    }
    with rig.job(mib=2) as job:
        for said, config in cases.items():
            images = rig.images()
            dumped = rig.dump(job, images, config=config)
            assert dumped.status != 0 and said in dumped.log + dumped.output, (said, dumped.errors)
            job.run_on()
            assert not (images / INVENTORY).exists()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_key_that_goes_while_the_dump_is_made(
    newest_rig: Rig, signer: Pair, me: Pair, layout: str
) -> None:
    """It is read again when all is written: the dump fails, and the job runs on."""
    rig = newest_rig
    told, _ = laid_out(layout, me)
    with rig.job(mib=2) as job:
        images = rig.images()
        rig.emulator.add_fault("checkpoint", "delay", delay_ms=8000)  # the key goes before

        def remove_key() -> None:
            while "the checkpoint is signed by" not in read_log(images):
                time.sleep(0.01)
            signer.key.unlink()

        remover = threading.Thread(target=remove_key)
        remover.start()
        dumped = rig.dump(job, images, config=signed_by(signer, **told))
        remover.join()
        assert dumped.status != 0 and "cannot open the private key" in dumped.errors, dumped.errors
        rig.settle(images)
        job.run_on()
        assert not (images / INVENTORY).exists() and not (images / SIGNATURE).exists()
        # Either was whole: unsealed, it would have been a complete checkpoint.
        assert not {path.name for path in images.iterdir()} & {FILES, SEALED}


def read_log(images: Path) -> str:
    log = log_path(images, "dump")
    return log.read_text() if log.exists() else ""
