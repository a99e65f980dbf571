"""The checkpoint archives that a node's kubelet has had made: what each of them says of itself.

Archives are taken for hostile: only a few small members are read, with limits. Source: checkpointctl
(lib/metadata.go and `checkpointctl show`) for members, keys and columns; the kubelet's documentation
for the directory.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cudackpt.errors import ImageError
from cudackpt.runtimes.tar_walk import members

DIRECTORY = Path("/var/lib/kubelet/checkpoints")
JSON_LIMIT = 8 << 20  # bytes of one member that is read
_TEXT_LIMIT = 300  # characters of a value that is shown
_CONFIG, _SPEC, _STATUS = "config.dump", "spec.dump", "status"
_IMAGES, _ROOTFS_DIFF = "checkpoint/", "rootfs-diff.tar"
_UNKNOWN = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """One archive. created: of the container, RFC 3339, or "-". checkpoint_bytes: of CRIU's images
    and ours; rootfs_diff_bytes: of what the container changed in its file system, None without.
    """

    path: Path
    container: str
    image: str
    id: str
    runtime: str
    created: str
    engine: str
    checkpoint_bytes: int
    rootfs_diff_bytes: int | None


def list_archives(directory: Path) -> tuple[list[Archive], list[ImageError]]:
    """The archives (*.tar) in `directory`, oldest name first, and what was wrong with others.

    Raises ImageError if the directory cannot be read.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(directory))
    except OSError as exc:
        raise ImageError(f"cannot list {directory}: {exc.strerror}") from exc
    archives, errors = [], []
    for name in names:
        if not name.endswith(".tar"):
            continue
        try:
            archives.append(read_archive(directory / name))
        except ImageError as exc:
            errors.append(exc)
    return archives, errors


def read_archive(path: Path) -> Archive:
    """What one archive says of itself. Raises ImageError if it is none, or damaged."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return _read(handle, path)
        finally:
            os.close(handle)
    except OSError as exc:
        raise ImageError(f"cannot read {path}: {exc.strerror}") from exc


def _read(handle: int, path: Path) -> Archive:
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        raise ImageError(f"{path} is no regular file")
    title = str(path)
    texts: dict[str, bytes] = {}
    images, diff = 0, None
    for member in members(handle, status.st_size, title):
        if not member.regular:
            continue
        if member.name.startswith(_IMAGES):
            images += member.size
        elif member.name == _ROOTFS_DIFF:
            diff = member.size
        elif member.name in (_CONFIG, _SPEC, _STATUS):
            if member.name in texts:
                raise ImageError(f"{title} has two members {member.name}")
            if member.size > JSON_LIMIT:
                raise ImageError(
                    f"{title}: {member.name} has {member.size} bytes; at most {JSON_LIMIT} are read"
                )
            texts[member.name] = os.pread(handle, member.size, member.offset)
    config = _parse(texts, _CONFIG, title)
    spec = _parse(texts, _SPEC, title)
    notes = spec.get("annotations")
    notes = notes if isinstance(notes, dict) else {}
    engine, name, created = _engine(notes, config, texts, title)
    return Archive(
        path=path,
        container=name,
        image=_text(config.get("rootfsImageName")),
        id=_text(config.get("id")),
        runtime=_text(config.get("runtime")),
        created=created,
        engine=engine,
        checkpoint_bytes=images,
        rootfs_diff_bytes=diff,
    )


def _engine(
    notes: dict[str, Any], config: dict[str, Any], texts: dict[str, bytes], title: str
) -> tuple[str, str, str]:
    """(engine, container's name, created), by what each engine writes into the container's spec."""
    manager = notes.get("io.container.manager")
    if manager == "libpod":
        return "Podman", _text(config.get("name")), _text(config.get("createdTime"))
    if manager == "cri-o":
        name = _crio_name(notes.get("io.kubernetes.cri-o.Metadata"))
        return "CRI-O", _text(name), _text(notes.get("io.kubernetes.cri-o.Created"))
    name = notes.get("io.kubernetes.cri.container-name")
    if name is None:
        return _UNKNOWN, _text(config.get("name")), _text(config.get("createdTime"))
    created = _parse(texts, _STATUS, title).get("CreatedAt") if _STATUS in texts else None
    return "containerd", _text(name), _time(created) or _text(config.get("createdTime"))


def _crio_name(metadata: object) -> object:
    """The name in what CRI-O writes of the container as a JSON text."""
    try:
        value = json.loads(metadata) if isinstance(metadata, str) else None
    except (ValueError, RecursionError):
        return None
    return value.get("name") if isinstance(value, dict) else None


def _parse(texts: dict[str, bytes], name: str, title: str) -> dict[str, Any]:
    if name not in texts:
        raise ImageError(f"{title} is no checkpoint archive: it has no {name}")
    try:
        value = json.loads(texts[name])
    except (ValueError, RecursionError) as exc:
        raise ImageError(f"{title}: {name} is no JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ImageError(f"{title}: {name} is no JSON object")
    return value


def _text(value: object) -> str:
    """A value for a terminal: one line of printable characters, "-" if it is no text or empty."""
    if not isinstance(value, str) or not value:
        return _UNKNOWN
    text = "".join(char if char.isprintable() else "?" for char in value)
    return text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]}..."


def _time(nanoseconds: object) -> str:
    """RFC 3339 of a time in ns since 1970; "" if it is none."""
    if not isinstance(nanoseconds, int) or not 0 < nanoseconds < 1 << 62:
        return ""
    return datetime.fromtimestamp(nanoseconds // 10**9, UTC).isoformat().replace("+00:00", "Z")
