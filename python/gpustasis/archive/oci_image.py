# SPDX-License-Identifier: Apache-2.0
"""An OCI image that Podman, CRI-O and containerd restore a container from: the archive as its one
layer, and annotations that say what it is.

Sources: checkpointctl lib/annotations.go and internal/oci_image_build.go (org.criu.checkpoint.*);
Podman libpod/define/annotations.go; CRI-O pkg/annotations (checkpoint.*).
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from uuid import uuid4

from gpustasis import process
from gpustasis.archive.layout import ContainerFacts, Engine
from gpustasis.archive.opened import Archive
from gpustasis.errors import ArchiveError, CheckpointError, UnsupportedError

TOOLS = ("buildah", "podman")  # in the order in which they are preferred
_CRIU = "org.criu.checkpoint."
_PODMAN = "io.podman.annotations.checkpoint."
_CRIO = "io.kubernetes.cri-o.annotations.checkpoint."
_ENGINE_NAMES = {
    Engine.PODMAN: "Podman",
    Engine.CRI_O: "CRI-O",
    Engine.CONTAINERD: "containerd",
    Engine.UNKNOWN: "",
}
_GLOB = re.compile(r"([*?\[\\])")
_TEXT_SHOWN = 500  # characters of what a tool said last


def checkpoint_annotations(facts: ContainerFacts) -> dict[str, str]:
    """Those of all engines, as far as the archive says what belongs there.

    Raises ArchiveError if the container has no name, by which the engines tell a checkpoint, or a
    value has control characters.
    """
    if not facts.container_name:
        raise ArchiveError("the archive does not say which container it is of (config.dump)")
    found = {
        f"{_CRIU}engine.name": _ENGINE_NAMES[facts.engine],
        f"{_CRIU}container.name": facts.container_name,
        f"{_CRIU}pod.name": facts.pod,
        f"{_CRIU}pod.namespace": facts.namespace,
        f"{_CRIU}rootfsImageUserRequested": facts.image_requested,
        f"{_CRIU}rootfsImageName": facts.image,
        f"{_CRIU}rootfsImageID": facts.image_id,
        f"{_CRIU}runtime.name": facts.runtime,
        f"{_PODMAN}runtime.name": facts.runtime,
    }
    for prefix in (_PODMAN, _CRIO):
        found[f"{prefix}name"] = facts.container_name
        found[f"{prefix}rawImageName"] = facts.image_requested
        found[f"{prefix}rootfsImageName"] = facts.image
        found[f"{prefix}rootfsImageID"] = facts.image_id
    for key, value in found.items():
        if not value.isprintable():
            raise ArchiveError(f"the archive has control characters in {key}: {value[:80]!r}")
    return {key: value for key, value in found.items() if value}


def build_image(archive: Archive, name: str, tool: str | None = None) -> str:
    """Make the image `name` in the store of buildah or podman; the tool that did it.

    tool: one of TOOLS; None: the first that is there. The archive was surveyed when it was opened,
    so its names lead nowhere; what is in its images is not checked here.

    Raises ArchiveError, UnsupportedError if there is no tool, CheckpointError if it fails.
    """
    if not name or name.startswith("-") or not name.isprintable():
        raise CheckpointError(f"{name!r} is no name for an image")
    notes = checkpoint_annotations(archive.facts())
    chosen = _find_tool(tool)
    builders = {"buildah": _with_buildah, "podman": _with_podman}
    builders[chosen](archive.path.absolute(), name, notes)
    return chosen


def _find_tool(wanted: str | None) -> str:
    for tool in TOOLS if wanted is None else (wanted,):
        if shutil.which(tool) is not None:
            return tool
    absent = f"{wanted} is not" if wanted else f"neither {' nor '.join(TOOLS)} is"
    raise UnsupportedError(f"{absent} in PATH; it is needed to build an image")


def _with_buildah(archive: Path, name: str, notes: Mapping[str, str]) -> None:
    container = f"gpustasis-{uuid4().hex}"
    _run(["buildah", "from", "--name", container, "scratch"])
    try:
        _run(["buildah", "add", "--quiet", container, str(archive), "/"])
        words = [word for item in notes.items() for word in ("--annotation", "=".join(item))]
        _run(["buildah", "config", *words, container])
        _run(["buildah", "commit", "--quiet", container, name])
    finally:
        process.run(["buildah", "rm", container])


def _with_podman(archive: Path, name: str, notes: Mapping[str, str]) -> None:
    """From a build file beside nothing else; the directory of the archive is its context."""
    with tempfile.TemporaryDirectory(prefix="gpustasis-build-") as scratch:
        source = _GLOB.sub(r"\\\1", archive.name)
        build_file, nothing_ignored = Path(scratch) / "Containerfile", Path(scratch) / "ignore"
        build_file.write_text(f"FROM scratch\nADD {json.dumps([source, '/'])}\n")
        nothing_ignored.touch()
        words = [word for item in notes.items() for word in ("--annotation", "=".join(item))]
        files = ["--file", str(build_file), "--ignorefile", str(nothing_ignored)]
        _run(["podman", "build", "--quiet", *files, *words, "--tag", name, str(archive.parent)])


def _run(argv: Sequence[str]) -> None:
    try:
        ended = process.run(argv)
    except OSError as exc:
        raise CheckpointError(f"cannot run {argv[0]}: {exc}") from exc
    if ended.status != 0:
        said = ended.output.strip()[-_TEXT_SHOWN:]
        raise CheckpointError(f"{argv[0]} {argv[1]} failed ({ended.ending}): {said}")
