# SPDX-License-Identifier: Apache-2.0
"""The record of mapped files: two readers agree on it, it stays with the checkpoint, and a host is
compared with it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gpustasis._core import (
    MANIFEST_NAME,
    CorruptDataError,
    FileIdentity,
    FilePlace,
    Manifest,
    RequiredFile,
    Requirements,
    UnsupportedDataError,
    file_difference,
    parse_manifest,
    read_manifest,
    write_manifest,
)
from gpustasis.diagnosis import Finding, Status, mapped_files, restorability
from gpustasis.driver import Device
from gpustasis.errors import ImageError, UnsupportedError
from gpustasis.image.checkpoint import DirectoryFiles
from gpustasis.image.flatten import flatten
from gpustasis.image.inspection import inspect_directory
from gpustasis.image.requirements import find_requirements
from support import plain_manifest
from support.image_samples import CHECKPOINT_ID, GPU, make_checkpoint, mixture

ONE_DIRECTORY = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200
)
PLACES = [FilePlace.HOST, FilePlace.CONTAINER, FilePlace.INNER]
BUILD_ID = RequiredFile(
    path="/usr/lib/libcuda.so.580.95.05", size=9, identity=FileIdentity.BUILD_ID, id=b"b" * 20
)

_paths = st.binary(min_size=1, max_size=40).filter(lambda raw: b"\0" not in raw).map(b"/".__add__)
_identities = st.one_of(
    st.tuples(st.just(FileIdentity.SIZE), st.just(b""), st.integers(0, 2**64 - 1)),
    st.tuples(
        st.just(FileIdentity.BUILD_ID),
        st.binary(min_size=1, max_size=32),
        st.integers(0, 2**64 - 1),
    ),
    st.tuples(
        st.just(FileIdentity.CONTENT), st.binary(min_size=16, max_size=16), st.integers(0, 1 << 20)
    ),
)


def _file(place: int, path: bytes, told: tuple[FileIdentity, bytes, int]) -> RequiredFile:
    return RequiredFile(
        place=PLACES[place],
        path=path.decode("utf-8", "surrogateescape"),
        size=told[2],
        identity=told[0],
        id=told[1],
    )


_files = st.dictionaries(st.tuples(st.integers(0, 2), _paths), _identities, max_size=6).map(
    lambda found: [_file(*key, told) for key, told in sorted(found.items(), key=lambda it: it[0])]
)
_requirements = st.builds(Requirements, files=_files, unrecorded=st.integers(0, 2**32 - 1))


def manifest_of(requirements: Requirements | None) -> Manifest:
    return Manifest(checkpoint_id=CHECKPOINT_ID, requirements=requirements)


@ONE_DIRECTORY
@given(requirements=_requirements)
@example(requirements=Requirements())
def test_both_readers_read_what_was_written(tmp_path: Path, requirements: Requirements) -> None:
    write_manifest(tmp_path, manifest_of(requirements))
    assert read_manifest(tmp_path).requirements == requirements
    plain = plain_manifest.parse_manifest((tmp_path / MANIFEST_NAME).read_bytes())
    assert plain.unrecorded == requirements.unrecorded
    assert plain.files is not None
    assert [(f.path, f.place, f.size, f.identity, f.id) for f in plain.files] == [
        (f.path.encode("utf-8", "surrogateescape"), f.place.value, f.size, f.identity.value, f.id)
        for f in requirements.files
    ]


def test_without_a_record_it_says_so(tmp_path: Path) -> None:
    write_manifest(tmp_path, manifest_of(None))
    assert read_manifest(tmp_path).requirements is None
    raw = (tmp_path / MANIFEST_NAME).read_bytes()
    assert raw[16:24] == bytes(8)  # as every reader before this one knows it
    assert plain_manifest.parse_manifest(raw).files is None


def verdict(read: Callable[[], object]) -> str:
    try:
        read()
    except (CorruptDataError, ImageError):
        return "corrupt"
    except (UnsupportedDataError, UnsupportedError):
        return "unsupported"
    return "whole"


def test_both_readers_refuse_the_same_files(tmp_path: Path) -> None:
    write_manifest(
        tmp_path,
        manifest_of(
            Requirements(
                files=[
                    BUILD_ID,
                    RequiredFile(place=FilePlace.CONTAINER, path="/data", size=1),
                    RequiredFile(
                        place=FilePlace.INNER,
                        path="/jit",
                        size=2,
                        identity=FileIdentity.CONTENT,
                        id=b"c" * 16,
                    ),
                ],
                unrecorded=1,
            )
        ),
    )
    whole = (tmp_path / MANIFEST_NAME).read_bytes()
    generator = random.Random(7)
    verdicts = set()
    for _ in range(4000):
        file = bytearray(whole)
        file[generator.randrange(len(file) - 16)] = generator.choice([0, 1, 2, 3, 4, 47, 255])
        if generator.random() < 0.1:
            del file[generator.randrange(96, len(file)) :]
            file += bytes(16)
        file[-16:] = xxhash.xxh3_128_digest(file[:-16])
        core = verdict(lambda now=bytes(file): parse_manifest(now, "it"))  # type: ignore[misc]
        plain = verdict(lambda now=bytes(file): plain_manifest.parse_manifest(now))  # type: ignore[misc]
        assert core == plain
        verdicts.add(core)
    assert verdicts == {"whole", "corrupt", "unsupported"}


def test_a_flat_copy_keeps_the_record(tmp_path: Path) -> None:
    source, flat = tmp_path / "source", tmp_path / "flat"
    source.mkdir()
    old = make_checkpoint(source, {7: mixture()})
    requirements = Requirements(files=[BUILD_ID])
    write_manifest(
        source,
        Manifest(
            checkpoint_id=old.checkpoint_id,
            gpus=old.gpus,
            tasks=old.tasks,
            requirements=requirements,
        ),
    )
    flatten(source, flat)
    assert read_manifest(flat).requirements == requirements


def test_gpu_memory_is_told_by_gpu_as_far_as_it_is_known(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, {7: mixture()})
    found = inspect_directory(tmp_path)
    needed = find_requirements(DirectoryFiles(tmp_path), found)
    assert needed is not None
    assert [gpu.memory_bytes for gpu in needed.gpus] == [24 << 20]
    assert (needed.unplaced_bytes, needed.files) == (0, None)

    make_checkpoint(tmp_path, {7: mixture()}, staged_in_criu=(8, 9))  # one of unknown size
    needed = find_requirements(DirectoryFiles(tmp_path), inspect_directory(tmp_path))
    assert needed is not None
    assert [gpu.memory_bytes for gpu in needed.gpus] == [None]


def test_each_gpu_needs_one_with_as_much_memory(tmp_path: Path) -> None:
    """In the sum there is enough: a smaller one of the model, and a large one of another."""
    make_checkpoint(tmp_path, {7: mixture()})
    found = inspect_directory(tmp_path)

    def verdict(*memory: tuple[str, int]) -> Finding:
        devices = tuple(
            Device(name=name, uuid=f"GPU-{number}", memory_size=size << 20)
            for number, (name, size) in enumerate(memory)
        )
        return restorability._gpu_memory(found, devices, "no-such-nvml.so")

    assert verdict((GPU.name, 24), ("another", 1000)).status == "note"  # what is in use: not known
    refused = verdict((GPU.name, 23), ("another", 1000))
    assert refused.status == "problem"
    assert f"24.0 MiB needed on one {GPU.name}, which has 23.0 MiB" in refused.text


def test_links_lead_nowhere_outside(tmp_path: Path) -> None:
    (tmp_path / "passwd").symlink_to("/etc/passwd")
    assert file_difference(tmp_path, "/passwd", RequiredFile(path="/x", size=1)) == "is missing"
    with pytest.raises(OSError, match="none"):
        file_difference(tmp_path / "none", "/x", BUILD_ID)


def compare(
    files: list[RequiredFile],
    mounts: Mapping[str, str | None] | None = None,
    rootfs: Path | None = None,
    *,
    has_changes: bool = False,
) -> list[Finding]:
    found = Requirements(files=files)
    return list(mapped_files.check(found, mounts or {}, rootfs, has_changes=has_changes))


def inside(path: str, size: int = 5) -> RequiredFile:
    return RequiredFile(place=FilePlace.CONTAINER, path=path, size=size)


class TestContainers:
    """Where a file of a container is looked for on this host."""

    def test_in_its_root_file_system(self, tmp_path: Path) -> None:
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib" / "a").write_bytes(b"12345")
        (unknown,) = compare([inside("/lib/a")])
        assert (unknown.name, unknown.status) == ("root file system", "note")
        (same,) = compare([inside("/lib/a")], rootfs=tmp_path)
        assert same.status == "ok"
        (other,) = compare([inside("/lib/a", 6)], rootfs=tmp_path)
        assert other.status == "problem"
        assert other.text == "/lib/a has 5 bytes; expected: 6 bytes"
        (missing,) = compare([inside("/lib/b")], rootfs=tmp_path)
        assert "/lib/b is missing" in missing.text

    def test_what_the_container_made_itself_may_be_missing(self, tmp_path: Path) -> None:
        (found,) = compare([inside("/made")], rootfs=tmp_path, has_changes=True)
        assert (found.name, found.status) == ("root file system", "note")
        assert found.text.startswith("/made missing in it")

    def test_below_the_innermost_mount(self, tmp_path: Path) -> None:
        (tmp_path / "one").write_bytes(b"12345")
        mounts = {"/data": "/nowhere", "/data/in": str(tmp_path), "/data/in/memory": None}
        (same,) = compare([inside("/data/in/one")], mounts)
        assert same.status == "ok"
        (other,) = compare([inside("/data/one")], mounts)
        assert other.text.startswith("/data/one (here /nowhere/one) is missing")
        (anew,) = compare([inside("/data/in/memory/one")], mounts)
        assert anew.status == "note"
        (beside,) = compare([inside("/database")], mounts)
        assert beside.name == "root file system"

    def test_mounts_of_a_configuration(self) -> None:
        spec = {
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/data", "type": "bind", "source": "/srv"},
                {"destination": "/lib", "type": "none", "source": "/l", "options": ["rbind"]},
                {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"},
            ]
        }
        assert mapped_files.mounts_of(json.dumps(spec).encode()) == {
            "/proc": None,
            "/data": "/srv",
            "/lib": "/l",
            "/tmp": None,
        }
        assert mapped_files.mounts_of(None) == {}
        assert mapped_files.mounts_of(b"{}") == {}

    def test_a_mount_whose_name_is_too_long(self) -> None:
        place = "/" + "x" * 300
        (found,) = compare([inside("/data/file")], {"/data": place})
        assert (found.name, found.status) == ("mapped files", Status.PROBLEM)
        spec = {"mounts": [{"destination": "/d", "type": "bind", "source": place}]}
        (found,) = restorability._mounts(json.dumps(spec).encode())
        assert (found.name, found.status) == ("mounts", Status.PROBLEM)

    @pytest.mark.parametrize(
        "spec",
        [
            *(b"", b"[]", b"\xff", b'{"mounts": 5}', b'{"mounts": [7]}', b'{"mounts": [{}]}'),
            *(
                b'{"mounts": [{"destination": "/a", "type": "bind", "source": "/%s"}]}' % source
                for source in (b"\\udcff", b"\\ud800", b"a\\u0000b", b"x/" * 3000)
            ),
        ],
    )
    def test_a_configuration_that_is_none(self, spec: bytes) -> None:
        with pytest.raises(ValueError, match=r".*"):
            mapped_files.mounts_of(spec)


def test_old_checkpoints_say_that_nothing_was_recorded() -> None:
    (found,) = mapped_files.check(None, {}, None, has_changes=False)
    assert found.status == "note"
    assert "not recorded" in found.text
