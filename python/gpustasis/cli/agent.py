# SPDX-License-Identifier: Apache-2.0
"""`gpustasis agent`: the daemon of a node, and what it is asked."""

from __future__ import annotations

import logging
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from gpustasis.agent.client import Client
from gpustasis.agent.config import DEFAULT_FILE, DEFAULT_SOCKET, load
from gpustasis.agent.subjects import CONTAINERS
from gpustasis.cli import output
from gpustasis.cli.framework import Group
from gpustasis.errors import AgentError
from gpustasis.text import mib

_socket = click.option(
    "--socket",
    "place",
    type=click.Path(dir_okay=False, path_type=Path),
    default=DEFAULT_SOCKET,
    show_default=True,
    help="Where the agent listens.",
)


@click.group("agent", cls=Group)
def command() -> None:
    """The agent of a node: checkpoints on request and at intervals, one after the other."""


@command.command("run")
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"The agent's configuration file.  [default: {DEFAULT_FILE}, if it is there]",
)
def run(config: Path | None) -> None:
    """Be the agent, until SIGTERM. Its log goes to stderr, as JSON lines."""
    from gpustasis.agent import daemon

    found = load(config)
    daemon.start_log(min(logging.getLogger().level, logging.INFO))
    daemon.run(found)
    output.answer({"socket": found.socket})


@command.command("status")
@_socket
def status(place: Path) -> None:
    """Show what the agent is doing, and what it did last."""
    with Client(place) as client:
        found = client.status()

    def show() -> None:
        output.say(f"{found['at_work']} at work, {found['waiting']} waiting")
        for target in found["targets"]:
            due = target["next_due"]
            when = f"due {_time(due)}" if due else "on request"
            output.say(f"target {target['name']}: {when}")
        if found["operations"]:
            titles = ("ID", "STATE", "WHAT", "USER", "ASKED", "RESULT")
            output.table(titles, map(_row, found["operations"]))

    output.answer({key: one for key, one in found.items() if key != "version"}, show)


@command.command("checkpoint")
@click.argument("what", metavar="PID|CONTAINER|TARGET")
@click.option("--stop", is_flag=True, help="The job ends with its checkpoint.")
@click.option("--no-wait", is_flag=True, help="Return when it is in the queue.")
@_socket
def checkpoint(what: str, stop: bool, no_wait: bool, place: Path) -> None:
    """Have the agent checkpoint a process with all below it, by its PID; a container, as
    podman:NAME, containerd:NAMESPACE/POD/CONTAINER or crio:...; or a target of the agent's
    configuration. It runs on, unless told otherwise.

    If this command ends early the checkpoint goes on. With tier = "ram" in the agent's
    configuration the checkpoint is in memory when this command ends with status 0: `gpustasis wait`
    says when it is on the disk.
    """
    named: dict[str, int | str] = {"target": what}
    if what.isdecimal():
        named = {"pid": int(what)}
    elif what.partition(":")[0] in CONTAINERS and ":" in what:
        named = {"container": what}
    with Client(place) as client, output.status(f"checkpointing {what}"):
        found = client.checkpoint(stop=stop, wait=not no_wait, **named)
    output.answer({"operation": found})
    if not no_wait and found["state"] != "done":
        raise AgentError(f"operation {found['id']} {found['state']}: {found['error']}")
    output.answer({}, lambda: output.say(_line(found)))


@command.command("cancel")
@click.argument("id")
@_socket
def cancel(id: str, place: Path) -> None:
    """Cancel operation ID, as `status` shows it: one that waits, or that would end its job."""
    with Client(place) as client:
        found = client.cancel(id)
    fields = {"operation": found["operation"], "done": found["done"]}
    output.answer(fields, lambda: output.say(f"operation {id} {found['done']}"))


def _what(operation: dict[str, Any]) -> str:
    subject = operation["subject"]
    name = (
        f"{subject['engine']}:{subject['name']}" if subject["engine"] else f"pid {subject['pid']}"
    )
    return f"{operation['target']} ({name})" if operation["target"] else name


def _line(operation: dict[str, Any]) -> str:
    figures = operation["figures"]
    if figures is None:
        return f"operation {operation['id']} is {operation['state']}"
    stood = figures["downtime_s"]
    text = "" if stood is None else f", {stood:.2f} s of standing still"
    emulated = " (emulator: no real GPU)" if figures["emulated"] else ""
    local = _tier(figures, ", until the agent has drained it")
    return (
        f"{_what(operation)} is in {operation['place']}{local}: {mib(figures['size_bytes'])} in "
        f"{mib(figures['stored_bytes'])}{text} ({figures['duration_s']:.2f} s){emulated}"
    )


def _tier(figures: dict[str, Any] | None, more: str = "") -> str:
    """What is to be said of a checkpoint that is not on the disk."""
    tier = "durable" if figures is None else figures["tier"]
    return {"local": f", in memory only{more}", "gone": ", which was in memory only: gone"}.get(
        tier, ""
    )


def _row(operation: dict[str, Any]) -> tuple[object, ...]:
    place = operation["place"] + _tier(operation["figures"])
    result = operation["error"] or operation["note"] or place
    return (
        operation["id"],
        operation["state"],
        _what(operation),
        operation["uid"],
        _time(operation["asked"]),
        result,
    )


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}"
