# SPDX-License-Identifier: Apache-2.0
"""`gpustasis peer`: copies of checkpoints in the memory of a neighbour."""

from __future__ import annotations

import signal
import threading
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import click

from gpustasis.agent.notify import notify
from gpustasis.cli import output
from gpustasis.cli.framework import Command, Group
from gpustasis.cli.options import Size
from gpustasis.draining.priority import lower
from gpustasis.errors import PeerError
from gpustasis.image.directory import allow_many_files
from gpustasis.peers import copying
from gpustasis.peers.config import DEFAULT_FILE, Address, Config, load, parse_address
from gpustasis.peers.copies import Copies, Copy
from gpustasis.peers.serving import Server
from gpustasis.text import mib


class _Address(click.ParamType[Address]):
    name = "address"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> Address:
        try:
            return parse_address(value)
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


_config = click.option(
    "--config",
    "place",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"The file that names the neighbour and the certificates.  [default: {DEFAULT_FILE}]",
)
_at = click.option(
    "--at",
    type=_Address(),
    metavar="HOST:PORT",
    help="Ask this node.  [default: the neighbour of the configuration]",
)


@click.group("peer", cls=Group)
def command() -> None:
    """Copies of checkpoints in the memory of a neighbour: for when this node dies."""


@command.command("serve", cls=Command)
@_config
def serve(place: Path | None) -> None:
    """Take copies of neighbours' checkpoints into memory, until SIGTERM. Root's service."""
    allow_many_files()
    server = Server(load(place))
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    server.start()
    notify("READY=1")
    address = load(place).listen
    output.say(f"taking copies at {address} into {server.copies.directory}")
    ended.wait()
    server.close()
    output.answer({"directory": server.copies.directory})


@command.command("copy", cls=Command)
@click.argument("images", type=click.Path(file_okay=False, exists=True, path_type=Path))
@click.option(
    "--rate-limit",
    type=Size(),
    default=0,
    metavar="SIZE",
    help="Send at most so much in a second; 0: as much as the network takes.  [default: 0]",
)
@_config
def copy(images: Path, rate_limit: int, place: Path | None) -> None:
    """Copy the checkpoint in IMAGES to the neighbour, and what it is built on with it.

    It is in memory on two nodes when this command ends: `gpustasis wait --for peer` says so then.
    """
    done = copy_aside(images, load(place), rate_limit)
    output.answer(
        asdict(done),
        lambda: output.say(
            f"{images} is on {done.node} too, in {done.peer_directory}: "
            + (
                f"{mib(done.bytes)} in {done.seconds:.2f} s"
                if done.copies
                else "it was there already"
            )
        ),
    )


def copy_aside(images: Path, config: Config, rate: int = 0) -> copying.Copied:
    """Copy as a command does that is to be in no job's way: with the priorities of lower(), which
    the calling thread keeps."""
    lower()
    allow_many_files()
    with output.bars() as update:
        return copying.copy(
            images,
            config,
            rate=rate,
            on_progress=lambda count, total: update(f"copying {images}", count, total),
        )


@command.command("list", cls=Command)
@click.option("--here", is_flag=True, help="Those that this node keeps for others.")
@_at
@_config
def list_copies(here: bool, at: Address | None, place: Path | None) -> None:
    """List the copies that a neighbour keeps, or with --here those that this node keeps."""
    config = load(place)
    if here:
        if at is not None:
            raise click.UsageError("--here and --at exclude each other")
        found = Copies(config).all()
    else:
        found = copying.list_copies(_address(at, config), config)

    def show() -> None:
        rows = []
        for one in found:
            taken = datetime.fromtimestamp(one.taken).astimezone()
            directory = f"{one.store}/{one.name}"
            rows.append(
                (f"{taken:%Y-%m-%d %H:%M:%S}", one.key, mib(one.bytes), one.node, directory)
            )
        output.table(("TAKEN", "KEY", "MEMORY", "NODE", "DIRECTORY"), rows)

    output.answer({"copies": [asdict(one) for one in found]}, show)


@command.command("fetch", cls=Command)
@click.argument("key", metavar="ID|KEY")
@click.option(
    "-o",
    "--output",
    "out",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="The new image directory; what the checkpoint is built on is put beside it.",
)
@_at
@_config
def fetch(key: str, out: Path, at: Address | None, place: Path | None) -> None:
    """Bring a copy from a neighbour, by the id of its checkpoint or its key, as `list` shows it."""
    config = load(place)
    address = _address(at, config)
    chosen = _one_of(copying.list_copies(address, config), key, str(address))
    allow_many_files()
    places = copying.fetch(address, config, chosen.key, out)
    output.answer(
        {"directory": out, "key": chosen.key, "directories": places},
        lambda: output.say(f"{out} is there: `gpustasis restore -D {out}` restores it"),
    )


@command.command("discard", cls=Command)
@click.argument("key", metavar="ID|KEY")
@click.option("--here", is_flag=True, help="One that this node keeps, whoever has sent it.")
@_at
@_config
def discard(key: str, here: bool, at: Address | None, place: Path | None) -> None:
    """Have the neighbour give up a copy that this node has sent, or with --here have this node
    give one up: the node that has sent it may be gone for good."""
    config = load(place)
    if here:
        if at is not None:
            raise click.UsageError("--here and --at exclude each other")
        chosen = _one_of(Copies(config).all(), key, "this node")
        copying.discard_here(config, chosen.key)
        who = "this node"
    else:
        address = _address(at, config)
        who = str(address)
        chosen = _one_of(copying.list_copies(address, config), key, who)
        copying.discard(address, config, chosen.key)
    output.answer(
        {"key": chosen.key}, lambda: output.say(f"{who} has given up the copy {chosen.key}")
    )


def _address(at: Address | None, config: Config) -> Address:
    found = at or config.peer
    if found is None:
        raise PeerError("the configuration has no `peer`: name a node with --at")
    return found


def _one_of(copies: list[Copy], key: str, who: str) -> Copy:
    """By key, or by the id of its checkpoint or the beginning of one; of several copies of one
    checkpoint the last that came."""
    found = [one for one in copies if one.key.startswith(key)]
    if not key or not found:
        raise PeerError(f"{who} has no copy {key!r}")
    if len({one.checkpoint for one in found}) > 1:
        raise PeerError(f"{who} has copies of several checkpoints that begin with {key!r}")
    if len(nodes := {one.node for one in found}) > 1:
        raise PeerError(
            f"{who} has copies of {key!r} of several nodes ({', '.join(sorted(nodes))}): name one "
            "by its whole key"
        )
    return found[-1]
