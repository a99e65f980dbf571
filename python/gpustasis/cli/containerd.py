# SPDX-License-Identifier: Apache-2.0
"""`gpustasis containerd` and `gpustasis crio`: checkpoint containers of a Kubernetes node, through
its container runtime."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import IO

import click

from gpustasis.cli import output
from gpustasis.cli.framework import Group
from gpustasis.install.layout import with_hook
from gpustasis.runtimes import containerd, cri_containers, left_paused
from gpustasis.runtimes.cri import Cri
from gpustasis.text import mib


@click.group("containerd", cls=Group)
@click.option(
    "--address",
    default=containerd.DEFAULT_ADDRESS,
    show_default=True,
    metavar="SOCKET",
    help="The runtime's CRI socket.",
)
@click.pass_context
def command(ctx: click.Context, address: str) -> None:
    """Checkpoint containers that run under containerd's CRI. Needs the extra `cri`."""
    ctx.obj = address


@click.group("crio", cls=Group)
@click.option(
    "--address",
    default=containerd.CRIO_ADDRESS,
    show_default=True,
    metavar="SOCKET",
    help="The runtime's CRI socket.",
)
@click.pass_context
def crio(ctx: click.Context, address: str) -> None:
    """Checkpoint containers that run under CRI-O. Needs the extra `cri`."""
    ctx.obj = address


@command.command("checkpoint")
@click.argument("container")
@click.option(
    "-e",
    "--export",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The archive to write; it must not exist yet.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.IntRange(1, 7 * 86400),
    default=containerd.DEFAULT_TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="After that long the runtime is told to give up.",
)
@click.pass_obj
def checkpoint(address: str, container: str, export: Path, timeout_s: int) -> None:
    """Write a checkpoint of CONTAINER into an archive; the container runs on.

    CONTAINER is the beginning of its id, or NAMESPACE/POD/CONTAINER.
    """
    with Cri(address) as cri:
        runtime = cri.runtime()
        found = cri_containers.find(cri, container)
        interrupted: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: interrupted.append(number))
        with output.status(f"checkpointing container {found}"):
            done = containerd.checkpoint(
                cri, found, export, timeout_s, stop=lambda: bool(interrupted)
            )
    output.answer(
        {"container": asdict(found), "runtime": str(runtime), **asdict(done)},
        lambda: output.say(
            f"container {found} is in {done.archive}: {mib(done.size)} "
            f"({runtime}, {done.seconds:.2f} s)"
        ),
    )


@command.command("resume")
@click.argument("container", required=False)
@click.option(
    "--watch",
    is_flag=True,
    help="Watch the runtime, until SIGTERM or SIGINT, and resume every container that it leaves "
    "paused when it ends in the middle of a checkpoint.",
)
@click.pass_context
def resume(ctx: click.Context, container: str | None, watch: bool) -> None:
    """Let CONTAINER run on if a checkpoint has left it paused.

    CONTAINER is the beginning of its id, or NAMESPACE/POD/CONTAINER. With --watch none is named:
    containers that were paused otherwise stay paused. --json then prints one object a line, one for
    each thing that happened.
    """
    if watch == (container is not None):
        raise click.UsageError("name one CONTAINER, or give --watch")
    if container is None:
        _watch(ctx)
        return
    with Cri(ctx.obj) as cri:
        found = cri_containers.find(cri, container, cri_containers.PERHAPS_PAUSED)
        resumed = cri_containers.resume(cri, found)
    state = "was paused and runs on" if resumed else "is not paused"
    output.answer(
        {"container": asdict(found), "resumed": resumed},
        lambda: output.say(f"container {found} {state}"),
    )


def _watch(ctx: click.Context) -> None:
    def say(event: left_paused.Event) -> None:
        output.stream({"event": asdict(event)})
        if event.what == "failed":
            output.warn(event.text)
        else:
            output.say(event.text)

    group = ctx.parent
    assert group is not None
    stop, ended = os.pipe()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os.write(ended, b"."))
    watch = left_paused.Watch(ctx.obj, f"gpustasis {group.command.name}", say)
    watch.run(stop)


@command.command("list")
@click.pass_obj
def list_containers(address: str) -> None:
    """Show the containers that the runtime knows."""
    with Cri(address) as cri:
        found = cri_containers.containers(cri)
    output.answer(
        {"containers": [asdict(one) for one in found]},
        lambda: output.table(
            ("ID", "NAMESPACE", "POD", "CONTAINER", "IMAGE", "STATE"),
            ((c.id[:13], c.namespace, c.pod, c.name, c.image, c.state) for c in found),
        ),
    )


@command.command("base-spec")
@click.argument("spec", type=click.File("rb"))
def base_spec(spec: IO[bytes]) -> None:
    """Print SPEC with gpustasis's OCI hook in it, for containerd's option base_runtime_spec.

    SPEC is what "ctr oci spec" prints, or "-" to read it from stdin. With the hook, annotations
    io.gpustasis.* have an effect under containerd. "gpustasis install" puts the hook in place.
    """
    made = with_hook(spec.read(), spec.name)
    output.answer({"spec": made}, lambda: output.exact(json.dumps(made, indent=4)))


for _same in (checkpoint, resume, list_containers):
    crio.add_command(_same)
