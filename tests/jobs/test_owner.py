# SPDX-License-Identifier: Apache-2.0
"""A rank's directory belongs to one job: another one is refused there, by name."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from gpustasis.errors import JobError
from gpustasis.files import give_name
from gpustasis.jobs import owner
from gpustasis.jobs.owner import OWNER, owner_of
from gpustasis.jobs.place import Place, place_of


def place_for(job: str, tmp_path: Path) -> Place:
    return place_of(job, 0, tmp_path / "kept", tmp_path / "run")


def test_a_directory_of_one_job_is_refused_to_another(tmp_path: Path) -> None:
    first, second = place_for("train", tmp_path), place_for("eval", tmp_path)
    first.make()
    first.make()  # as its next keeper does
    said = f"{first.directory} belongs to job train, and not to job eval"
    with pytest.raises(JobError, match=re.escape(said)):
        second.make()
    assert owner_of(first.directory) == "train"
    assert os.listdir(first.directory) == [OWNER]
    place_of("eval", 1, tmp_path / "kept", tmp_path / "run").make()  # no dump of the other is there
    (first.directory / OWNER).unlink()  # as the error says
    second.make()


def test_a_directory_of_an_older_build_belongs_to_whoever_comes_first(tmp_path: Path) -> None:
    place = place_for("train", tmp_path)
    place.images(7).mkdir(parents=True)
    assert owner_of(place.directory) == ""
    place.make()
    assert owner_of(place.directory) == "train"
    assert place.images(7).is_dir()
    with pytest.raises(JobError, match="belongs to job train"):
        place_for("eval", tmp_path).make()


def test_of_two_that_come_at_the_same_time_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_for("train", tmp_path)

    def late(part: Path, path: Path) -> None:
        path.write_text("eval\n")
        give_name(part, path)

    monkeypatch.setattr(owner, "give_name", late)
    with pytest.raises(JobError, match="belongs to job eval, and not to job train"):
        place.make()
    assert os.listdir(place.directory) == [OWNER]


def test_a_disk_that_is_full_keeps_no_keeper_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The tasks of one that was killed stand until the next is there."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(owner, "give_name", full)
    place = place_for("train", tmp_path)
    place.make()
    assert f"{OWNER} cannot be written: No space left" in caplog.text
    assert os.listdir(place.directory) == []


@pytest.mark.parametrize("text", ["", "../train\n", "a\nb\n", "x" * 300])
def test_what_names_no_job_is_refused(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "_PATIENCE_S", 0.1)
    place = place_for("train", tmp_path)
    place.directory.mkdir(parents=True)
    (place.directory / OWNER).write_text(text)
    with pytest.raises(JobError, match=f"{OWNER} names no job .* remove it"):
        place.make()
