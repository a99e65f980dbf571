# SPDX-License-Identifier: Apache-2.0
"""A post-dump script that says no, or is killed: CRIU fails, the job runs on, and what the script
was shown stays a checkpoint. Whoever runs the script may have committed it before, as the keeper of
a rank does. What is in memory goes: test_ram_tier.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from campaigns.rig import CRIU_TIMEOUT_S, Rig, await_line, log_path
from gpustasis._core import MANIFEST_NAME
from gpustasis.criu.plugin import Scalar
from gpustasis.image.verification import verify_directory
from support.signatures import make_signer

ENDS = ["exit 1", "kill -KILL $$"]
TELLS = (4, 3)  # the first criu that tells plugins that a script has failed


Configs = tuple[dict[str, Scalar], dict[str, Scalar]]  # of the dump, and of the restore


def _plain(_: Path) -> Configs:
    return {}, {}


def _signed(place: Path) -> Configs:
    """A restore that believes nothing but the signature."""
    signer = make_signer(place)
    signs = {"sign": str(signer.key), "sign_certificate": str(signer.certificate)}
    return {**signs}, {"trusted": [str(signer.certificate)]}


def says_no(rig: Rig, end: str) -> list[str]:
    script = rig.scratch / "says-no"
    script.write_text(f'#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ] || {end}\n')
    script.chmod(0o700)
    return ["--action-script", str(script)]


@pytest.mark.parametrize("leave", [("--leave-running",), ()])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", [_plain, _signed])
def test_what_the_script_was_shown_can_be_restored(
    rig: Rig,
    tmp_path: Path,
    kind: Callable[[Path], Configs],
    end: str,
    leave: tuple[str, ...],
) -> None:
    to_dump, to_restore = kind(tmp_path)
    with rig.job(mib=4) as job:
        images = rig.images()
        dumped = rig.dump(job, images, *leave, *says_no(rig, end), config=to_dump)
        assert dumped.status != 0
        job.run_on()
        rig.settle(images)
        assert not verify_directory(images).problems
        job.end()
        restored = rig.restore(images, config=to_restore)
        assert restored.status == 0, restored.errors
        job.run_on()


def test_pages_of_an_earlier_dump_are_not_taken_for_those_of_a_page_server(rig: Rig) -> None:
    """What lies in the image directory would be restored with the memory of the first dump."""
    with rig.job(mib=4) as job:
        images, sent = rig.images(), rig.images()
        assert rig.dump(job, images, "--leave-running").status == 0
        at = ["--address", "127.0.0.1"]
        serves = [*rig.criu.command(rig.environ), "page-server", "-D", str(sent), *at]
        log = log_path(sent, "server")
        server = rig.start([*serves, "-v4", "-o", str(log)])
        # That it starts is said before it listens, at a port that the system gives it.
        await_line(server, log, "Running status-ready scripts")
        port = re.search(r"Using (\d+) port\n", log.read_text())
        assert port is not None
        to_it = ["--leave-running", "--page-server", *at, "--port", port[1]]
        dumped = rig.dump(job, images, *to_it, *says_no(rig, "exit 1"))
        assert dumped.status != 0
        job.run_on()
        rig.settle(images)
        server.wait(CRIU_TIMEOUT_S)
        assert list(sent.glob("pages-*.img"))  # all had arrived
        if rig.criu.version >= TELLS:
            assert not (images / "inventory.img").exists()
            assert not (images / MANIFEST_NAME).exists()
            job.end()
            assert rig.restore(images).status != 0
            assert not job.alive_pids()
