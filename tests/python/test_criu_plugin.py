# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustasis.criu.plugin import (
    PLUGIN_NAME,
    driver_libraries,
    find_config,
    format_config,
    plugin_directory,
    read_config,
)
from gpustasis.errors import CheckpointError, UnsupportedError

TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.just("\x7f"))
VALUES = st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXT


@given(settings=st.dictionaries(TEXT, VALUES, max_size=5))
def test_what_is_formatted_is_read_back(settings: dict[str, bool | int | str]) -> None:
    assert tomllib.loads(format_config(settings)) == settings


def test_a_file_is_read_and_overridden(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('externalize = true\nthreads = 2 # two\ndriver = "libother.so"\n')
    merged = read_config(path) | {"externalize": "off"}
    assert merged == {"externalize": "off", "threads": 2, "driver": "libother.so"}


@pytest.mark.parametrize("content", ["threads = ", "[table]\nx = 1\n", "x = 1.5\n", "x = [1]\n"])
def test_what_cannot_be_a_configuration_names_the_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=str(path)):
        read_config(path)


def test_the_environment_names_the_configuration() -> None:
    assert find_config({"GPUSTASIS_CONFIG": "/my.toml"}) == Path("/my.toml")


def test_the_driver_is_the_configured_one(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('driver = "/emulator/libcuda.so.1"\n')
    assert driver_libraries({"GPUSTASIS_CONFIG": str(path)}) == (
        "/emulator/libcuda.so.1",
        "libnvidia-ml.so.1",
    )


def test_the_plugin_is_where_the_environment_says(tmp_path: Path) -> None:
    environ = {"GPUSTASIS_PLUGIN_DIR": str(tmp_path)}
    with pytest.raises(UnsupportedError, match=f"{tmp_path}/{PLUGIN_NAME} is missing"):
        plugin_directory(environ)
    (tmp_path / PLUGIN_NAME).touch()
    assert plugin_directory(environ) == tmp_path


def test_the_package_brings_a_plugin_alone_in_its_directory() -> None:
    directory = plugin_directory({})
    assert [item.name for item in directory.iterdir()] == [PLUGIN_NAME]
