# SPDX-License-Identifier: Apache-2.0
"""Where the engines put things in a checkpoint archive, and what they say of the container.

Sources: checkpointctl lib/metadata.go and internal/container.go; Podman's exportCheckpoint; CRI-O
internal/lib/checkpoint.go; containerd internal/cri/server/container_checkpoint_linux.go.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gpustasis._core import MANIFEST_NAME
from gpustasis.criu.images import INVENTORY_NAME, PSTREE_NAME
from gpustasis.criu.statistics import statistics_name
from gpustasis.errors import ArchiveError

CHECKPOINT = "checkpoint/"  # CRIU's image directory
ROOTFS_DIFF = "rootfs-diff.tar"
VOLUMES = "volumes/"
CONFIG, SPEC = "config.dump", "spec.dump"
_STATUS = "status"  # containerd only
_BIND_MOUNTS = "bind.mounts"  # CRI-O only
_POD = "pod.options"
_PRE_CHECKPOINT = "pre-checkpoint/"
_OCI_LAYOUT = "oci-layout"
_SMALL = {
    *(MANIFEST_NAME, PSTREE_NAME, INVENTORY_NAME),
    *(statistics_name("dump"), statistics_name("restore")),
}
_MANAGER = "io.container.manager"
_CRI = "io.kubernetes.cri."
_CRIO = "io.kubernetes.cri-o."


# What CRI-O makes anew for a container (server/container_restore.go, 1.36), and what a kubelet
# mounts of its own accord.
_MOUNTS_OF_THE_NODE = frozenset(
    {
        *("/proc", "/sys", "/sys/fs/cgroup", "/run/secrets", "/run/.containerenv"),
        *(f"/dev{name}" for name in ("", "/pts", "/mqueue", "/shm", "/termination-log")),
        *(f"/etc/{name}" for name in ("resolv.conf", "hostname", "hosts", "passwd", "group")),
        "/var/run/secrets/kubernetes.io/serviceaccount",
    }
)


class Engine(StrEnum):
    """Whose archive it is."""

    PODMAN = "podman"
    CRI_O = "cri-o"
    CONTAINERD = "containerd"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerFacts:
    """What the archive says of its container, believed as it stands; "": it does not say.

    image: by its full name; image_requested: as the user named it; image_id: of the engine's store.
    created, checkpointed: RFC 3339.
    """

    engine: Engine
    container_name: str
    container_id: str
    pod: str
    namespace: str
    image: str
    image_requested: str
    image_id: str
    runtime: str
    created: str
    checkpointed: str


def is_small(name: str) -> bool:
    """Whether a member is one of those that are read whole."""
    if name in (CONFIG, SPEC):
        return True
    inner = name.removeprefix(CHECKPOINT)
    is_core = inner.startswith("core-") and inner.endswith(".img")
    return name.startswith(CHECKPOINT) and (inner in _SMALL or is_core)


def require_container(names: Collection[str], archive: str) -> None:
    """Raise ArchiveError, with a reason, if these members are no container's checkpoint."""
    if any(f"{name}/".startswith(CHECKPOINT) for name in names):
        return
    if _POD in names:
        raise ArchiveError(
            f"{archive}: is the checkpoint of a whole pod; give one container's archive out of it"
        )
    if any(name.startswith(_PRE_CHECKPOINT) for name in names):
        raise ArchiveError(
            f"{archive}: is a pre-checkpoint: it holds CPU memory and nothing of a GPU"
        )
    if _OCI_LAYOUT in names:
        raise ArchiveError(
            f"{archive}: is an OCI image layout (ctr image export); give the checkpoint of "
            "CheckpointContainer, or unpack its criu.checkpoint blob and give the directory"
        )
    raise ArchiveError(f"{archive}: has no {CHECKPOINT}: it is no container's checkpoint")


def read_facts(small: Mapping[str, bytes], names: Collection[str], archive: str) -> ContainerFacts:
    """From config.dump and spec.dump, as far as they are there. Raises ArchiveError if one of them
    is no JSON object."""
    config = _json(small, CONFIG, archive)
    spec = _json(small, SPEC, archive)
    annotations = spec.get("annotations")
    notes = annotations if isinstance(annotations, dict) else {}
    engine = _engine(notes, names)
    name = _text(config, "name")
    if engine is Engine.CRI_O:
        name = _crio_name(notes) or name
    elif engine is Engine.CONTAINERD:
        name = _text(notes, f"{_CRI}container-name") or name
    on_crio = engine is Engine.CRI_O
    return ContainerFacts(
        engine=engine,
        container_name=name,
        container_id=_text(config, "id"),
        pod=_text(notes, "io.kubernetes.pod.name" if on_crio else f"{_CRI}sandbox-name"),
        namespace=_text(
            notes, "io.kubernetes.pod.namespace" if on_crio else f"{_CRI}sandbox-namespace"
        ),
        image=_text(config, "rootfsImageName") or _text(config, "rootfsImage"),
        image_requested=_text(config, "rootfsImage"),
        image_id=_text(config, "rootfsImageRef"),
        runtime=_text(config, "runtime"),
        created=_text(notes, f"{_CRIO}Created") or _text(config, "createdTime"),
        checkpointed=_text(config, "checkpointedTime"),
    )


def crio_mounts(small: Mapping[str, bytes], archive: str) -> list[str]:
    """Where the container had mounts that the pod has to name in which CRI-O is to restore it.
    Believed as it stands. Raises ArchiveError if spec.dump is no JSON object."""
    mounts = _json(small, SPEC, archive).get("mounts")
    listed = mounts if isinstance(mounts, list) else []
    places = [_text(mount, "destination") for mount in listed if isinstance(mount, dict)]
    return [place for place in places if place and place not in _MOUNTS_OF_THE_NODE]


def _engine(annotations: Mapping[str, Any], names: Collection[str]) -> Engine:
    manager = annotations.get(_MANAGER)
    if manager == "libpod":
        return Engine.PODMAN
    if manager == "cri-o" or _BIND_MOUNTS in names:
        return Engine.CRI_O
    if any(key.startswith(_CRI) for key in annotations) or _STATUS in names:
        return Engine.CONTAINERD
    return Engine.UNKNOWN


def _crio_name(annotations: Mapping[str, Any]) -> str:
    """CRI-O keeps the name in JSON within JSON."""
    try:
        metadata = json.loads(_text(annotations, f"{_CRIO}Metadata") or "{}")
    except (ValueError, RecursionError):
        return ""
    return _text(metadata, "name") if isinstance(metadata, dict) else ""


def _json(small: Mapping[str, bytes], name: str, archive: str) -> dict[str, Any]:
    if name not in small:
        return {}
    try:
        found = json.loads(small[name])
    except (ValueError, RecursionError) as exc:  # ValueError: not UTF-8, or not JSON
        raise ArchiveError(f"{archive}: {name}: {exc}") from exc
    if not isinstance(found, dict):
        raise ArchiveError(f"{archive}: {name}: is no JSON object")
    return found


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    return value if isinstance(value, str) else ""
