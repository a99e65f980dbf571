# SPDX-License-Identifier: Apache-2.0
"""What is left in the places that streams come through, and what no stream is made with."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpustasis.cli.stream_ends import new_file
from gpustasis.criu.own_options import own_option
from gpustasis.errors import CheckpointError
from gpustasis.streaming import spool
from support.command import call


def test_what_dead_receivers_leave(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = tmp_path / "received"
    for name in (".aa.part", "bb", ".young.part"):
        (received / name).mkdir(parents=True)
        os.utime(received / name, (1, 1))
    os.utime(received / ".young.part")
    held = os.open(received / "bb", os.O_RDONLY)
    spool.sweep_received(received)
    assert {path.name for path in received.iterdir()} == {"bb", ".young.part"}
    assert f"restore -D {received / 'bb'}" in caplog.text
    os.close(held)


@pytest.mark.parametrize(
    "word", ["--leave-running", "--leave-r", "-R", "-jR", "-SR", "-cR", "--page-server"]
)
def test_options_of_criu_that_are_not_for_a_stream(word: str) -> None:
    from gpustasis.cli.stream_checks import require_streamable

    with pytest.raises(CheckpointError, match="sent as a stream"):
        require_streamable([word])
    require_streamable(["--tcp-established", "-vR", "-lj", "--skip-mnt=/R"])
    assert own_option(["-js"]) == "-js"


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_of_somebody_else_is_not_removed(tmp_path: Path, *, replaced: bool) -> None:
    path = tmp_path / "job.gps"
    with ExitStack() as opened:
        target = new_file(opened, path, 1.0)
        assert target.name_file is not None
        target.name_file()
        if replaced:
            path.rename(tmp_path / "moved")
            path.write_text("somebody's")
        target.discard()
    assert path.exists() == replaced
    assert not replaced or path.read_text() == "somebody's"


@pytest.mark.parametrize(
    "words",
    [
        *(("checkpoint", "2", word, "5") for word in ("--stall-timeout", "--restore-timeout")),
        *(("checkpoint", "2", *words) for words in (("--spool", "/x"), ("--one-way",))),
        *(("restore", *words) for words in (("--stall-timeout", "5"), ("--source-may-run",))),
        *(("restore", word) for word in ("--two-way", "--one-way")),
    ],
    ids=" ".join,
)
def test_options_of_a_stream_are_for_streams(tmp_path: Path, words: tuple[str, ...]) -> None:
    images = tmp_path / "images"
    images.mkdir()
    done = call(*words, "-D", images)
    assert (done.exit_code, "belongs to a stream: -" in done.output) == (2, True), done.output
    assert list(images.iterdir()) == []
