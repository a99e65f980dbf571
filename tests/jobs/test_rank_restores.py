# SPDX-License-Identifier: Apache-2.0
"""A restore of a job brings all ranks back, or none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpustasis.emulator import Emulator
from gpustasis.errors import JobError
from jobs.test_ranks import network, ring, store  # noqa: F401 - fixtures
from support.json_output import check_document
from support.ring import PORT, WORLD, Network, Ring


@contextmanager
def changed(path: Path) -> Iterator[None]:
    """One byte of it."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    yield
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def refused(ring: Ring) -> str:  # noqa: F811
    """Why; nothing of the job is left, or locked."""
    ring.start_restoring()
    done = ring.job("restore")
    assert done.returncode == JobError.exit_code, done.stderr + ring.logs()
    assert ring.ends() == [JobError.exit_code] * WORLD
    assert ring.pids() == []
    assert ring.locked() == []
    return done.stderr


def test_all_ranks_are_restored_or_none(
    ring: Ring,  # noqa: F811
    network: Network,  # noqa: F811
    emulator: Emulator,
) -> None:
    ring.start_all()
    ring.wait(lambda: min(ring.steps_now()) > 100)
    assert ring.job("checkpoint", "--world", str(WORLD), "-R").returncode == 0, ring.logs()
    made = ring.job("checkpoint")
    assert made.returncode == 0, made.stderr + ring.logs()
    assert ring.ends() == [0] * WORLD
    last = [ring.directory / f"kept/rank-{rank}/epoch-00000002" for rank in range(WORLD)]

    with changed(last[1] / "files.img"):
        assert "is not what was committed" in refused(ring)
        wrong = ring.job("verify")
        assert wrong.returncode == JobError.exit_code
        assert "rank 1: " in wrong.stdout

    image = max(last[2].glob("gpustasis-*.img"), key=lambda path: path.stat().st_size)
    with changed(image):  # the manifest vouches for its content: the plugin finds that it is wrong
        assert "criu 4" in (said := refused(ring)), said
        assert f"gpustasis-{image.stem.rpartition('-')[2]}.img" in said
        assert ring.job("verify").returncode == JobError.exit_code

    emulator.add_fault("restore", "error", code=999, count=1)
    assert "CUDA_ERROR_UNKNOWN" in refused(ring)  # three ranks had live connections by then

    address = f"{network.addresses[3]}/24"
    other = f"{network.host.rpartition('.')[0]}.200/24"
    network.inside(3, "ip", "addr", "del", address, "dev", "eth0")
    network.inside(3, "ip", "addr", "add", other, "dev", "eth0")
    said = refused(ring)
    assert f"needs the address {network.addresses[3]}, which is not here" in said
    network.inside(3, "ip", "addr", "flush", "dev", "eth0")
    network.inside(3, "ip", "addr", "add", address, "dev", "eth0")

    ring.start_restoring()
    back = ring.job("restore", "--epoch", "2")
    assert back.returncode == 0, back.stderr + ring.logs()
    ring.wait_for_progress()
    again = ring.job("restore")
    assert again.returncode == JobError.exit_code
    assert "runs, as process" in again.stderr
    ring.wait_for_progress()

    shown = check_document(ring.job("show", "--json").stdout, "job show")
    assert shown["epoch"] == 2
    assert [one["directory"] for one in shown["ranks"]] == list(map(str, last))
    assert all(len(one["network"]["connections"]) >= 2 for one in shown["ranks"])
    assert all(one["network"]["ports"] == [PORT] for one in shown["ranks"])
    assert all(len(one["id"]) == 32 for one in shown["ranks"])

    done = ring.job("prune", "--keep-last", "1", "--json")
    pruned = check_document(done.stdout, "job prune")
    assert [one["epoch"] for one in pruned["epochs"]] == [1]
    assert all(len(one["directories"]) == WORLD for one in pruned["epochs"])
    left = sorted(ring.directory.glob("kept/rank-*/epoch-*"))
    assert left == sorted(last)
    whole = check_document(ring.job("verify", "--json").stdout, "job verify")
    assert len(whole["ranks"]) == WORLD
    assert all(one["checked"] and not one["problems"] for one in whole["ranks"])
    gone = ring.job("restore", "--epoch", "1")
    assert "epoch 1 is no whole checkpoint: pruned" in gone.stderr
    shutil.rmtree(last[0])  # and so it is found that one is gone
    assert ring.job("verify").returncode == JobError.exit_code
