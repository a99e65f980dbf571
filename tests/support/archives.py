# SPDX-License-Identifier: Apache-2.0
"""Checkpoint archives in the shapes that the engines write, and hostile ones."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import zstandard

ENGINES = ("podman", "cri-o", "containerd")
COMPRESSIONS = ("none", "gzip", "zstd")
CONTAINER = "f11d11844af0c1a2f11d11844af0c1a2f11d11844af0c1a2f11d11844af0c1a2"
CREATED = "2026-11-20T14:45:26.083444055Z"


def compressed(raw: bytes, compression: str) -> bytes:
    if compression == "gzip":
        return gzip.compress(raw, 1, mtime=0)
    return zstandard.compress(raw, 1) if compression == "zstd" else raw


def config_dump(name: str = "trainer") -> dict[str, object]:
    """As Podman, CRI-O and containerd write it (checkpointctl lib/metadata.go)."""
    return {
        "id": CONTAINER,
        "name": name,
        "rootfsImage": "localhost/train:1",
        "rootfsImageRef": "a8758716bb6a",
        "rootfsImageName": "localhost/train:latest",
        "runtime": "runc",
        "createdTime": CREATED,
        "checkpointedTime": "2026-11-21T00:10:45.673538606+05:30",
        "restoredTime": "0001-01-01T00:00:00Z",
        "restored": False,
    }


def spec_annotations(engine: str) -> dict[str, str]:
    if engine == "podman":
        return {"io.container.manager": "libpod"}
    if engine == "cri-o":
        return {
            "io.container.manager": "cri-o",
            "io.kubernetes.cri-o.Metadata": '{"name":"trainer","attempt":0}',
            "io.kubernetes.cri-o.Created": CREATED,
            "io.kubernetes.pod.namespace": "jobs",
            "io.kubernetes.pod.name": "trainer-0",
        }
    return {
        "io.kubernetes.cri.container-name": "trainer",
        "io.kubernetes.cri.sandbox-namespace": "jobs",
        "io.kubernetes.cri.sandbox-name": "trainer-0",
    }


def side_files(engine: str) -> dict[str, bytes]:
    """What lies beside checkpoint/ (Podman's exportCheckpoint, CRI-O's and containerd's
    equivalents)."""
    name = "trainer" if engine == "podman" else f"k8s_trainer_trainer-0_jobs_{CONTAINER[:8]}_0"
    files = {
        "config.dump": json.dumps(config_dump(name)).encode(),
        "spec.dump": json.dumps({"annotations": spec_annotations(engine)}).encode(),
        "rootfs-diff.tar": bytes(10240),
        "stats-dump": b"\x19\x43\x56\x54",
        "dump.log": b"(00.000000) Version: 4.2.1\n",
    }
    if engine == "podman":
        files |= {
            "network.status": b"{}",
            "devshm-checkpoint.tar": bytes(1024),
            "deleted.files": b"[]",
            "volumes/data.tar": bytes(2048),
        }
    elif engine == "cri-o":
        files |= {"bind.mounts": b"[]", "io.kubernetes.cri-o.LogPath": b"/var/log/pods/0.log"}
    else:
        files |= {"status": b"{}", "container.log": b"started\n"}
    return files


def pack(images: Path, archive: Path, *, engine: str = "podman", compression: str = "none") -> Path:
    """Pack an image directory as that engine does; `archive`."""
    packed = io.BytesIO()
    # containerd's writer adds pax records to each member, Podman's and CRI-O's only where needed.
    headers = {"LIBARCHIVE.creationtime": "1700000000.5"} if engine == "containerd" else {}
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        prefix = "" if engine == "containerd" else "./"
        if prefix:
            tar.addfile(_directory(prefix))
        tar.addfile(_directory(f"{prefix}checkpoint/"))
        for path in sorted(images.iterdir()):
            info = tar.gettarinfo(path, f"{prefix}checkpoint/{path.name}")
            info.pax_headers = dict(headers)
            if info.isreg():
                with path.open("rb") as file:
                    tar.addfile(info, file)
            else:
                tar.addfile(info)
        for name, content in side_files(engine).items():
            info = tarfile.TarInfo(prefix + name)
            info.size, info.mode = len(content), 0o600
            tar.addfile(info, io.BytesIO(content))
    archive.write_bytes(compressed(packed.getvalue(), compression))
    return archive


def _directory(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, 0o700
    return info


@dataclass
class Raw:
    """One member to be, with whatever its header shall say. size: None: that of the content.
    fields: bytes at offsets of its header, over all else."""

    name: bytes
    content: bytes = b""
    type: bytes = b"0"
    target: bytes = b""
    size: int | None = None
    magic: bytes = b"ustar\0" + b"00"
    size_field: bytes | None = None
    prefix: bytes = b""
    fields: dict[int, bytes] = field(default_factory=dict)
    break_checksum: bool = False
    before: list[Raw] = field(default_factory=list)

    def packed(self) -> bytes:
        size = len(self.content) if self.size is None else self.size
        block = bytearray(512)
        block[0 : min(len(self.name), 100)] = self.name[:100]
        block[100:108] = b"0000600\0"
        block[108:124] = b"0000000\0" * 2
        block[124:136] = self.size_field or b"%011o\0" % size
        block[136:148] = b"%011o\0" % 1_700_000_000
        block[148:156] = b" " * 8
        block[156:157] = self.type
        block[157 : 157 + min(len(self.target), 100)] = self.target[:100]
        block[257:265] = self.magic
        block[329:345] = b"0000000\0" * 2
        block[345 : 345 + len(self.prefix)] = self.prefix
        for offset, content in self.fields.items():
            block[offset : offset + len(content)] = content
        struct.pack_into("8s", block, 148, b"%06o\0 " % (sum(block) + self.break_checksum))
        before = b"".join(member.packed() for member in self.before)
        return before + bytes(block) + self.content + bytes(-len(self.content) % 512)


def pax(**records: str) -> Raw:
    """A pax header for the member behind it; "__" in a keyword is a dot."""
    content = b""
    for key, value in records.items():
        body = b" %s=%s\n" % (key.replace("__", ".").encode(), value.encode())
        length = len(body) + len(str(len(body)))
        length = len(body) + len(str(length))
        content += str(length).encode() + body
    return Raw(b"PaxHeaders/x", content, type=b"x")


def tar(members: Iterable[Raw], end: bytes = bytes(1024)) -> bytes:
    return b"".join(member.packed() for member in members) + end


def flip_a_byte_of_gpu_memory(archive: Path) -> None:
    """Damage the image of its first CUDA task, in the middle. archive: a tar archive that is not
    compressed."""
    with tarfile.open(archive) as tar:
        (image,) = [one for one in tar if one.name.lstrip("./") == "checkpoint/gpustasis-1.img"]
    with archive.open("r+b") as file:
        file.seek(image.offset_data + image.size // 2)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
