# SPDX-License-Identifier: Apache-2.0
"""What a run of criu is told, seen by a program in its place."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from gpustasis.criu import plugin, run
from gpustasis.criu.find import Criu
from gpustasis.errors import CriuError

SCRIPT = """#!/bin/sh
[ "$1" = --version ] && {{ echo 'Version: {version}'; exit; }}
echo "$@" >{told}/words
/usr/bin/env >{told}/environ
[ -z "$GPUSTASIS_OVERRIDES" ] || cat "$GPUSTASIS_OVERRIDES" >{told}/overrides
exit 1
"""


@pytest.fixture(params=["4.1.1", "4.3"])
def recorder(request: pytest.FixtureRequest, tmp_path: Path) -> Criu:
    """A criu that notes what it was told, in tmp_path, and fails."""
    program = tmp_path / "criu"
    program.write_text(SCRIPT.format(version=request.param, told=tmp_path))
    program.chmod(0o755)
    version = tuple(map(int, request.param.split(".")))
    return Criu(program=program, root=None, version=version, origin="test")


def told(criu: Criu, **settings: object) -> tuple[str, dict[str, str], dict[str, object]]:
    """Words, environment and overrides of a dump."""
    place = criu.program.parent
    images = place / "images"
    images.mkdir()
    with pytest.raises(CriuError, match="exit 1"):
        run.dump(criu, os.getpid(), images, run.Settings(**settings))  # type: ignore[arg-type]
    lines = (place / "environ").read_text().splitlines()
    overrides = place / "overrides"
    return (
        (place / "words").read_text(),
        dict(line.split("=", 1) for line in lines if "=" in line),
        tomllib.loads(overrides.read_text()) if overrides.exists() else {},
    )


@pytest.mark.parametrize("plugin_settings", [{}, {"threads": 2}, {"parent": "/store/one"}])
def test_the_host_s_file_keeps_its_place_below_the_annotations(
    recorder: Criu,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plugin_settings: dict[str, plugin.Scalar],
) -> None:
    """Named for this run it would win over them, and `incremental` of it would meet `parent`."""
    host = tmp_path / "host.toml"
    host.write_text("threads = 5\nincremental = true\n")
    monkeypatch.setattr(plugin, "SYSTEM_CONFIG", host)
    monkeypatch.delenv("GPUSTASIS_CONFIG", raising=False)
    words, environ, overrides = told(recorder, plugin=plugin_settings)
    assert "GPUSTASIS_CONFIG" not in environ
    assert "--plugin-option" not in words
    assert overrides == plugin_settings


def test_a_file_that_was_named_is_left_to_the_plugin(
    recorder: Criu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, earlier = tmp_path / "named.toml", tmp_path / "earlier.toml"
    named.write_text("threads = 5\n")
    earlier.write_text('threads = 6\nincremental = true\ncompress = "none"\n')
    monkeypatch.setenv("GPUSTASIS_CONFIG", str(named))
    monkeypatch.setenv("GPUSTASIS_OVERRIDES", str(earlier))
    _, environ, overrides = told(recorder, plugin={"parent": "/store/one", "threads": 7})
    assert environ["GPUSTASIS_CONFIG"] == str(named)
    assert overrides == {"parent": "/store/one", "threads": 7, "compress": "none"}
