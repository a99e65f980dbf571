# SPDX-License-Identifier: Apache-2.0
"""Roots to install into."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis.criu.plugin import PLUGIN_NAME
from gpustasis.install.change import Change
from gpustasis.install.installation import install, uninstall
from gpustasis.install.root import Root

Install = Callable[..., dict[str, Change]]


def install_into(
    directory: Path, *, version: str = "1.0", dry_run: bool = False
) -> dict[str, Change]:
    """What was done, by path."""
    done: dict[str, Change] = {}
    with Root(directory) as root:
        install(root, version, sys.executable, lambda c: done.setdefault(c.path, c), dry_run)
    return done


def uninstall_from(directory: Path, *, dry_run: bool = False) -> dict[str, Change]:
    done: dict[str, Change] = {}
    with Root(directory) as root:
        assert uninstall(root, lambda c: done.setdefault(c.path, c), dry_run)
    return done


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty one."""
    directory = tmp_path / "root"
    directory.mkdir()
    return directory


def put(root: Path, path: str, text: str | bytes) -> Path:
    """A file of the administrator."""
    place = root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(text if isinstance(text, bytes) else text.encode())
    return place


@pytest.fixture(autouse=True)
def small_plugin(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests copy the plugin a thousand times and never load it."""
    directory = tmp_path_factory.mktemp("plugin")
    (directory / PLUGIN_NAME).write_bytes(b"a plugin")
    monkeypatch.setenv("GPUSTASIS_PLUGIN_DIR", str(directory))
