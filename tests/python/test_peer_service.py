# SPDX-License-Identifier: Apache-2.0
"""`gpustasis peer serve` as a service, where copies may be kept, and what is not copied."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpustasis.draining.drain import drain
from gpustasis.errors import PeerError, SealError
from gpustasis.peers.copies import Copies
from gpustasis.peers.copying import require_peer
from gpustasis.sealing.recipients import read_recipients
from gpustasis.sealing.seal import seal
from support.command import call
from support.json_output import check_document
from support.local_checkpoints import make_local
from support.peers import Nodes, write_config
from support.recipients import make_recipient

TIMEOUT_S = 30.0


def serve_words(nodes: Nodes, place: Path, directory: Path) -> list[str]:
    config = write_config(place, replace(nodes.keeper, directory=directory))
    words = ["peer", "serve", "--config", str(config), "--json"]
    return [sys.executable, "-m", "gpustasis", *words]


def test_it_tells_systemd_when_it_takes_copies(nodes: Nodes, tmp_path: Path) -> None:
    place = tmp_path / "notify"
    words = serve_words(nodes, tmp_path / "keeper.toml", nodes.keeper.directory)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(place))
        sock.settimeout(TIMEOUT_S)
        environ = {**os.environ, "NOTIFY_SOCKET": str(place)}
        with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE) as service:
            try:
                assert sock.recv(100) == b"READY=1"
                require_peer(nodes.sender)
                service.send_signal(signal.SIGTERM)
                service.communicate(timeout=TIMEOUT_S)
            finally:
                service.kill()  # nothing, if it has ended
        assert service.returncode == 0


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("disk", "is not on a tmpfs"),
        ("open", "has mode 0755"),
        ("another's", "belongs to user 12345"),
    ],
)
def test_a_directory_that_others_could_read_or_on_a_disk_is_refused(
    nodes: Nodes, tmp_path: Path, kind: str, why: str
) -> None:
    place = nodes.keeper.directory
    if kind == "disk":
        # Another run on this machine may have the same test's.
        place = Path("/var/tmp") / f"{os.getpid()}-{tmp_path.parent.name}-{tmp_path.name}"
    place.mkdir(mode=0o700)
    try:
        if kind == "open":
            place.chmod(0o755)
        elif kind == "another's":
            os.chown(place, 12345, 12345)
        ended = subprocess.run(
            serve_words(nodes, tmp_path / "keeper.toml", place),
            capture_output=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    finally:
        place.rmdir()
    assert ended.returncode == PeerError.exit_code, ended.stderr
    said = check_document(ended.stdout.decode(), "peer serve")["error"]["message"]
    assert f"copies cannot be kept in {place}: " in said
    assert why in said
    with pytest.raises(PeerError, match="cannot reach the neighbour"):
        require_peer(nodes.sender)


def test_sealed_checkpoints_are_not_copied(
    nodes: Nodes, keeper: Copies, tmp_path: Path, arena: Path
) -> None:
    plain, sealed = tmp_path / "plain", tmp_path / "sealed"
    make_local(plain, arena)
    drain(plain)
    seal(plain, read_recipients([make_recipient(tmp_path).certificate]), sealed)
    config = write_config(tmp_path / "peer.toml", nodes.sender)
    done = call("peer", "copy", sealed, "--config", config, "--json")
    assert done.exit_code == SealError.exit_code, done.output
    said = check_document(done.stdout, "peer copy")["error"]["message"]
    assert f"{sealed} is sealed: its files are encrypted" in said
    assert keeper.all() == []
    done = call("peer", "copy", plain, "--config", config, "--json")
    assert done.exit_code == 0, done.output
    assert [one.name for one in keeper.all()] == ["plain"]
