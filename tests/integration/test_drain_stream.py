# SPDX-License-Identifier: Apache-2.0
"""`gpustasis drain -o`: a checkpoint that was in memory first, as a stream in a file or a pipe,
with real CRIU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from campaigns.rig import Rig
from campaigns.steady_job import SteadyJob
from gpustasis._core import ARENA_MARKER
from gpustasis.errors import StreamError
from gpustasis.image.arena import Tier, tier_of
from gpustasis.image.directory import is_there
from gpustasis.streaming.channel import Descriptor
from gpustasis.streaming.finished import send_finished
from gpustasis.streaming.send import Target
from support.arena import dump, ram
from support.criu_roots import criu_place
from support.json_output import check_document


def call(rig: Rig, *words: str | Path, **options: object) -> subprocess.CompletedProcess[bytes]:
    environ = dict(rig.environ) | {"GPUSTASIS_CRIU": criu_place(rig.criu)}
    return subprocess.run(
        [sys.executable, "-m", "gpustasis", *map(str, words)],
        env=environ,
        capture_output=True,
        check=False,
        timeout=120,
        **options,  # type: ignore[call-overload]
    )


def restore_stream(rig: Rig, job: SteadyJob, stream: bytes, spool: Path) -> None:
    words = ("restore", "-i", "-", "--one-way", "-D", spool)
    refused = call(rig, *words, input=stream)
    assert refused.returncode == 18 and b"--source-may-run" in refused.stderr, refused.stderr
    done = call(rig, *words, "--source-may-run", input=stream)
    assert done.returncode == 0, done.stderr
    job.run_on()


@pytest.mark.parametrize("to_file", [True, False])
def test_what_was_drained_goes_into_a_stream_and_comes_back(
    newest_rig: Rig, arena: Path, tmp_path: Path, to_file: bool
) -> None:
    with newest_rig.job(mib=8, children=1) as job:
        images = dump(newest_rig, job, **ram(arena))
        job.wait()
        file = tmp_path / "stream"
        done = call(newest_rig, "drain", images, "-o", file if to_file else "-", "--json")
        assert done.returncode == 0, done.stderr
        assert tier_of(images) == Tier.DURABLE
        said = done.stdout if to_file else done.stderr
        found = check_document(said.decode(), "drain")
        stream = file.read_bytes() if to_file else done.stdout
        assert found["stream"]["to"] == (str(file) if to_file else "-")
        assert 0 < found["stream"]["bytes"] < len(stream)
        assert not list(tmp_path.glob("*.part"))
        restore_stream(newest_rig, job, stream, tmp_path / "spool")


def test_one_that_is_on_the_disk_is_only_sent(newest_rig: Rig, tmp_path: Path) -> None:
    with newest_rig.job(mib=4) as job:
        images = dump(newest_rig, job)
        job.wait()
        done = call(newest_rig, "drain", images, "-o", tmp_path / "stream", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["images"] == 0
        restore_stream(newest_rig, job, (tmp_path / "stream").read_bytes(), tmp_path / "spool")


def test_what_no_stream_holds_is_refused_before_anything_is_done(
    newest_rig: Rig, arena: Path, tmp_path: Path
) -> None:
    with newest_rig.job(mib=4) as job:
        first = dump(newest_rig, job, "--leave-running", **ram(arena))
        second = dump(newest_rig, job, **ram(arena, parent=str(first)))
        done = call(newest_rig, "drain", second, "-o", tmp_path / "stream")
        assert done.returncode == 10 and b"gpustasis flatten" in done.stderr, done.stderr
        assert tier_of(second) == Tier.LOCAL and not (tmp_path / "stream").exists()
        (tmp_path / "there").write_text("kept")
        done = call(newest_rig, "drain", first, "-o", tmp_path / "there")
        assert b"is there already" in done.stderr and tier_of(first) == Tier.LOCAL
        assert (tmp_path / "there").read_text() == "kept"


def test_a_pipe_that_breaks_leaves_the_checkpoint_on_the_disk(newest_rig: Rig, arena: Path) -> None:
    with newest_rig.job(mib=8) as job:
        images = dump(newest_rig, job, "--leave-running", **ram(arena))
        words = [sys.executable, "-m", "gpustasis", "drain", str(images), "-o", "-"]
        with subprocess.Popen(
            words, env=dict(newest_rig.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as at_work:
            assert at_work.stdout is not None and at_work.stderr is not None
            assert at_work.stdout.read(1000)
            at_work.stdout.close()
            assert b"broke off" in at_work.stderr.read()
            assert at_work.wait(60) == 18
        assert tier_of(images) == Tier.DURABLE and not is_there(images / ARENA_MARKER)


def test_a_file_that_changes_meanwhile_makes_no_stream(
    newest_rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with newest_rig.job(mib=4) as job:
        images = dump(newest_rig, job, "--leave-running")
        out = os.open(tmp_path / "stream", os.O_WRONLY | os.O_CREAT)
        target = Target(out=Descriptor(out, "it", writing=True))
        os.close(out)
        core = next(images.glob("core-*.img"))
        real = Descriptor.write

        def change(self: Descriptor, *words: object) -> None:
            core.write_bytes(core.read_bytes() + b"x")
            real(self, *words)  # type: ignore[arg-type]

        monkeypatch.setattr(Descriptor, "write", change)
        with pytest.raises(StreamError, match=r"was changed|became shorter"):
            send_finished(images, target)
