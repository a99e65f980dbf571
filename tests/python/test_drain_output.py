# SPDX-License-Identifier: Apache-2.0
"""`gpustasis drain -o` of what no stream can be made of: of checkpoints in memory that no dump has
made. With real ones: tests/integration/test_drain_stream.py."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpustasis.cli import cli
from gpustasis.image.arena import Tier, tier_of
from support.local_checkpoints import make_local


@pytest.fixture
def local(tmp_path: Path, arena: Path) -> Path:
    images = tmp_path / "one"
    make_local(images, arena)
    return images


def refused(images: Path, out: Path, status: int) -> str:
    """What is said of it."""
    result = CliRunner().invoke(cli, ["drain", str(images), "-o", str(out), "--json"])
    assert result.exit_code != 0, result.output
    error = json.loads(result.stdout)["error"]
    assert error["code"] == status
    return str(error["message"])


def test_a_stream_of_a_directory_is_not_written_into_it(local: Path, tmp_path: Path) -> None:
    said = refused(local, local / "stream", 3)
    assert said == f"{local / 'stream'} would be in {local}: name a place outside of it"
    (tmp_path / "link").symlink_to(local)
    assert "would be in" in refused(local, tmp_path / "link" / "stream", 3)
    assert tier_of(local) == Tier.LOCAL
    assert not list(local.glob("*stream*"))


def test_a_directory_in_it_is_named_and_the_checkpoint_is_on_the_disk(
    local: Path, tmp_path: Path
) -> None:
    (local / "logs").mkdir()
    said = refused(local, tmp_path / "stream", 18)
    assert said == f"cannot send {local / 'logs'}: is no ordinary file"
    assert tier_of(local) == Tier.DURABLE
    assert sorted(os.listdir(tmp_path)) == ["one"]


@pytest.mark.parametrize("call", ["readv", "fdatasync"])
def test_a_disk_that_fails_is_named_and_the_checkpoint_is_on_the_disk(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("gpustasis.streaming.spool.SYNC_EVERY", 0)
    monkeypatch.setattr(os, call, fail)
    said = refused(local, tmp_path / "stream", 18)
    words = "cannot send " if call == "readv" else f"cannot write {tmp_path / 'stream'}: "
    assert said.startswith(words) and said.endswith(": Input/output error")
    assert tier_of(local) == Tier.DURABLE
