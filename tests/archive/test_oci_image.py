# SPDX-License-Identifier: Apache-2.0
"""The annotations of a checkpoint image; tests/runtimes/test_archives.py builds real ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpustasis._core import SEALED_NAME
from gpustasis.archive.layout import ContainerFacts
from gpustasis.archive.oci_image import checkpoint_annotations
from gpustasis.archive.opened import open_archive
from gpustasis.cli import cli
from gpustasis.errors import ArchiveError, CheckpointError, SealError, UnsupportedError
from support.archives import CONTAINER, ENGINES, pack
from support.image_samples import make_checkpoint, mixture


@pytest.fixture
def facts(tmp_path: Path) -> ContainerFacts:
    return facts_of(tmp_path, "cri-o")


def facts_of(tmp_path: Path, engine: str) -> ContainerFacts:
    images = tmp_path / f"images-{engine}"
    images.mkdir()
    make_checkpoint(images, {7: mixture()})
    with open_archive(pack(images, tmp_path / f"{engine}.tar", engine=engine)) as archive:
        return archive.facts()


@pytest.mark.parametrize("engine", ENGINES)
def test_they_are_those_of_checkpointctl_podman_and_crio(tmp_path: Path, engine: str) -> None:
    in_pod = {
        "org.criu.checkpoint.pod.name": "trainer-0",
        "org.criu.checkpoint.pod.namespace": "jobs",
    }
    names = {"podman": "Podman", "cri-o": "CRI-O", "containerd": "containerd"}
    of_engines = {
        f"{prefix}.annotations.checkpoint.{key}": value
        for prefix in ("io.podman", "io.kubernetes.cri-o")
        for key, value in {
            "name": "trainer",
            "rawImageName": "localhost/train:1",
            "rootfsImageName": "localhost/train:latest",
            "rootfsImageID": "a8758716bb6a",
        }.items()
    }
    assert checkpoint_annotations(facts_of(tmp_path, engine)) == {
        "org.criu.checkpoint.engine.name": names[engine],
        "org.criu.checkpoint.container.name": "trainer",
        "org.criu.checkpoint.rootfsImageUserRequested": "localhost/train:1",
        "org.criu.checkpoint.rootfsImageName": "localhost/train:latest",
        "org.criu.checkpoint.rootfsImageID": "a8758716bb6a",
        "org.criu.checkpoint.runtime.name": "runc",
        "io.podman.annotations.checkpoint.runtime.name": "runc",
        **of_engines,
        **({} if engine == "podman" else in_pod),
    }


def test_hostile_values_are_refused(facts: ContainerFacts) -> None:
    assert facts.container_id == CONTAINER
    with pytest.raises(ArchiveError, match="does not say which container"):
        checkpoint_annotations(replace(facts, container_name=""))
    with pytest.raises(ArchiveError, match=r"control characters in .*pod\.name"):
        checkpoint_annotations(replace(facts, pod="a\nb"))


def test_without_a_tool_it_says_what_is_missing(
    tmp_path: Path, facts: ContainerFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for words, what in (
        ([], "neither buildah nor podman"),
        (["--with", "podman"], "podman is not in PATH"),
    ):
        result = CliRunner().invoke(
            cli, ["build-image", str(tmp_path / "cri-o.tar"), "-t", "localhost/a:1", *words]
        )
        assert isinstance(result.exception, UnsupportedError)
        assert what in str(result.exception)


@pytest.mark.parametrize("name", ["-rm", "", "a\nb"])
def test_names_that_are_none(tmp_path: Path, facts: ContainerFacts, name: str) -> None:
    result = CliRunner().invoke(cli, ["build-image", str(tmp_path / "cri-o.tar"), f"--tag={name}"])
    assert isinstance(result.exception, CheckpointError)
    assert "is no name for an image" in str(result.exception)


def test_of_a_sealed_checkpoint_the_container_is_looked_at(tmp_path: Path) -> None:
    """Who asks for more is told that it is sealed."""
    facts = facts_of(tmp_path, "cri-o")
    images = tmp_path / "images-cri-o"
    for path in images.iterdir():
        path.unlink()
    (images / SEALED_NAME).write_bytes(b"sealed")
    archive = pack(images, tmp_path / "sealed.tar", engine="cri-o")
    with pytest.raises(SealError, match="is sealed"), open_archive(archive):
        pass
    with open_archive(archive, closed=True) as opened:
        assert opened.sealed
        assert opened.facts() == facts
