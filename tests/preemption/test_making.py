# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a job: the time that each has, what is left of one that fails, and by which one
the next is reckoned."""

from __future__ import annotations

import math
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpustasis.errors import CheckpointError
from gpustasis.intervals import Periodic
from gpustasis.preemption import making
from gpustasis.preemption.dumping import Limits
from gpustasis.preemption.store import Found, JobStore
from gpustasis.preemption.tree import Memory
from preemption.test_parts import RECORD, settings_with
from support.packet_filters import put_nft


def tables(nft: Path) -> str:
    return subprocess.run(
        [nft, "list", "tables"], check=True, capture_output=True, text=True
    ).stdout


def test_one_in_between_has_half_of_the_time_once_the_job_is_told_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other half is for the one upon the signal. What criu holds back of the job's connections
    is let go of at once if it fails."""
    put_nft(tmp_path / "bin")
    nft, table = tmp_path / "bin/nft", f"CRIU-{os.getpid():x}"
    asked: list[float] = []
    limits: list[Limits] = []

    def dump(*words: Any, **_: Any) -> None:
        limits.append(words[3]())
        asked.append(100.0)
        limits.append(words[3]())
        subprocess.run([nft, "add", "table", "inet", table], check=True)
        (words[2] / "dump.log").write_text(f"[create table inet {table}]\n")
        raise CheckpointError("criu was killed")

    monkeypatch.setattr(making, "dump", dump)
    monkeypatch.setattr(making, "strays", lambda _: [])
    with JobStore(tmp_path / "store") as store:
        made = making.Making(settings_with(grace_s=12, reserve_s=6), store, (1, 2), lambda _: None)
        with pytest.raises(CheckpointError, match="criu was killed"):
            made.periodic(os.getpid(), lambda: asked[0] if asked else None)
    left = tables(nft)
    subprocess.run([nft, "delete", "table", "inet", table], check=False, capture_output=True)
    assert table not in left
    assert limits == [Limits(stop=math.inf, kill=math.inf), Limits(stop=103.0, kill=104.5)]


@pytest.mark.parametrize(
    ("periodic", "seconds"), [(None, 1.0), (Periodic(interval_s=60, mtbf_s=60), 9.0)]
)
def test_a_full_one_among_those_that_are_built_on_others_is_reckoned_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, periodic: Periodic | None, seconds: float
) -> None:
    kept = [replace(RECORD, seconds=each) for each in (1.0, 9.0, 2.0)]  # the newest first
    found = [
        Found(directory=tmp_path, number=number, record=each, unusable="")
        for number, each in enumerate(kept)
    ]
    settings = replace(settings_with(grace_s=30, reserve_s=5), periodic=periodic)
    with JobStore(tmp_path) as store:
        monkeypatch.setattr(store, "checkpoints", lambda _: iter(found))
        made = making.Making(settings, store, (1, 2), lambda _: None)
        slowest = made._slowest(Memory(cpu_bytes=1 << 30, gpu_bytes=0))
    assert slowest is not None
    assert slowest.seconds == seconds
