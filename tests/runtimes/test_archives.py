# SPDX-License-Identifier: Apache-2.0
"""Archives that Podman wrote, and the OCI images made of them, from which Podman restores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.engine_gpu import Steady, SteadyContainer
from support.engine_root import EngineRoot
from support.json_output import check_document

NAME = "archived"
ARCHIVE = "/mnt/shared/archived.tar.zst"
TOOLS = ("buildah", "podman")


@pytest.fixture
def archive(steady: Steady, shared: Path) -> Iterator[SteadyContainer]:
    """A container that is in ARCHIVE and nowhere else any more."""
    container = steady(NAME, "runc", mib=8, children=1)
    container.root.run("podman", "container", "checkpoint", "--export", ARCHIVE, NAME)
    container.remove()
    yield container
    container.remove()
    (shared / Path(ARCHIVE).name).unlink()


def annotations(root: EngineRoot, image: str) -> dict[str, str]:
    found = json.loads(root.run("podman", "image", "inspect", image).stdout)
    return dict(found[0]["Annotations"])


def test_podmans_archive_is_read_and_becomes_an_image(archive: SteadyContainer) -> None:
    root = archive.root
    found = json.loads(root.run("gpustasis", "inspect", "--json", ARCHIVE).stdout)
    facts = found["archive"]
    assert (facts["engine"], facts["compression"]) == ("podman", "zstd")
    assert (facts["container_name"], facts["runtime"]) == (NAME, "runc")
    assert found["checkpoint_id"] is not None
    assert [p["comm"] for p in found["processes"]] == ["steady_job"] * 2
    assert all(p["cuda"]["externalized"] for p in found["processes"])
    verified = root.run("gpustasis", "verify", ARCHIVE)
    assert "manifest and 2 images whole" in verified.stdout
    root.run("gpustasis", "flatten", ARCHIVE, "-o", "/tmp/flat")
    assert "manifest and 2 images whole" in root.run("gpustasis", "verify", "/tmp/flat").stdout
    root.run("rm", "-r", "/tmp/flat")

    for tool in TOOLS:
        image = f"localhost/checkpoint-{tool}:1"
        words = ("gpustasis", "build-image", ARCHIVE, "-t", image, "--with", tool)
        assert root.run(*words).stdout == f"{image}: built with {tool}\n"
        found = check_document(root.run(*words, "--json").stdout, "build-image")
        assert (found["image"], found["tool"]) == (image, tool)
        notes = annotations(root, image)
        assert notes["io.podman.annotations.checkpoint.name"] == NAME
        assert notes["io.podman.annotations.checkpoint.runtime.name"] == "runc"
        assert notes["io.kubernetes.cri-o.annotations.checkpoint.name"] == NAME
        assert notes["org.criu.checkpoint.container.name"] == NAME
        assert notes["org.criu.checkpoint.engine.name"] == "Podman"
        root.run("podman", "--runtime", "runc", "container", "restore", image)
        archive.run_on(2)
        archive.remove()
        root.run("podman", "rmi", image)
    assert root.run("buildah", "containers", "--quiet").stdout == ""


def test_a_tool_that_fails_or_is_not_there_is_told(archive: SteadyContainer) -> None:
    root = archive.root
    failed = root.run("gpustasis", "build-image", ARCHIVE, "-t", "NOT//A:NAME:", check=False)
    assert failed.returncode == 3
    assert "buildah commit failed (exit " in failed.stderr
    assert "Traceback" not in failed.stderr
    assert root.run("buildah", "containers", "--quiet").stdout == ""
    words = ("/usr/local/bin/gpustasis", "build-image", ARCHIVE, "-t", "localhost/none:1")
    absent = root.run("env", "PATH=/none", *words, check=False)
    assert absent.returncode == 20
    assert "neither buildah nor podman is in PATH" in absent.stderr
