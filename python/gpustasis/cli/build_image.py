# SPDX-License-Identifier: Apache-2.0
"""`gpustasis build-image ARCHIVE -t NAME`: an OCI image to restore a container from."""

from __future__ import annotations

from pathlib import Path

import click

from gpustasis._core import PARENT_LINK
from gpustasis.archive.layout import CHECKPOINT, Engine
from gpustasis.archive.oci_image import TOOLS, build_image
from gpustasis.archive.opened import inspect_archive, open_archive
from gpustasis.cli import output
from gpustasis.cli.framework import Command
from gpustasis.image.directory import allow_many_files

_SHOWN, _LONGEST = 32, 200  # mounts in a note, characters of each


@click.command("build-image", cls=Command)
@click.argument("archive", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-t", "--tag", "name", required=True, help="Name of the image.")
@click.option(
    "--with",
    "tool",
    type=click.Choice(TOOLS),
    help="The program to build with.  [default: the first that is there]",
)
def command(archive: Path, name: str, tool: str | None) -> None:
    """Make the OCI image NAME of ARCHIVE, from which its engine restores the container: Podman,
    CRI-O or containerd.

    The archive is looked through as by `gpustasis inspect` first; memory in it is not checked:
    `gpustasis verify` does that. Of a sealed checkpoint only the container is looked at: it stays
    sealed. Needs buildah or podman.
    """
    allow_many_files()
    with open_archive(archive, closed=True) as opened:
        found = None if opened.sealed else inspect_archive(opened)
        if CHECKPOINT + PARENT_LINK in opened.members and found is None:
            output.warn(
                "note: this checkpoint is sealed, and built on another one, which has to be on the "
                "machine where it is restored"
            )
        if found is not None and found.parent is not None:
            output.warn(
                f"note: this checkpoint is built on {found.parent.checkpoint_id}, which has to be "
                "on the machine where it is restored"
            )
        of_crio = opened.facts().engine is Engine.CRI_O
        mounts = opened.crio_mounts() if of_crio else []
        if mounts:
            output.warn(
                "note: CRI-O restores it in a pod that mounts something at each of: "
                + ", ".join(mount[:_LONGEST] for mount in mounts[:_SHOWN])
                + (f" and {len(mounts) - _SHOWN} more" if len(mounts) > _SHOWN else "")
            )
        used = build_image(opened, name, tool)
    output.answer(
        {"archive": archive, "image": name, "tool": used, "mounts": mounts},
        lambda: output.say(f"{name}: built with {used}"),
    )
