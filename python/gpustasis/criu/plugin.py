"""Our CRIU plugin: where it lies, and its configuration for one run."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from gpustasis import driver, nvml
from gpustasis.errors import CheckpointError, UnsupportedError

PLUGIN_NAME = "cuda_plugin.so"
SYSTEM_CONFIG = Path("/etc/gpustasis/config.toml")

Scalar = bool | int | str


def plugin_directory(environ: Mapping[str, str] | None = None) -> Path:
    """The directory to give to criu as --libdir: GPUSTASIS_PLUGIN_DIR, else the package's own.

    Raises UnsupportedError if the plugin is not there.
    """
    env = os.environ if environ is None else environ
    named = env.get("GPUSTASIS_PLUGIN_DIR")
    directory = Path(named) if named else Path(__file__).resolve().parent.parent / "plugin"
    if not (directory / PLUGIN_NAME).is_file():
        raise UnsupportedError(
            f"{directory / PLUGIN_NAME} is missing; "
            + ("GPUSTASIS_PLUGIN_DIR names that place" if named else "install gpustasis anew")
        )
    return directory.absolute()


def find_config(environ: Mapping[str, str] | None = None) -> Path | None:
    """The configuration that the plugin would read by itself; None: its defaults."""
    env = os.environ if environ is None else environ
    named = env.get("GPUSTASIS_CONFIG")
    if named:
        return Path(named)
    return SYSTEM_CONFIG if SYSTEM_CONFIG.exists() else None


def read_config(path: Path | None) -> dict[str, Scalar]:
    """What the file sets, by key; None: nothing. The plugin alone knows which keys there are.

    Raises CheckpointError if it cannot be read, or holds more than plain values.
    """
    if path is None:
        return {}
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:  # ValueError: not UTF-8, or not TOML
        raise CheckpointError(f"cannot read the configuration {path}: {exc}") from exc
    for key, value in settings.items():
        if not isinstance(value, bool | int | str):
            raise CheckpointError(f"configuration {path}: the value of {key!r} is not a plain one")
    return settings


def format_config(settings: Mapping[str, Scalar]) -> str:
    """The TOML text that sets these."""
    return "".join(f"{_toml(key)} = {_toml(value)}\n" for key, value in settings.items())


def driver_libraries(environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """The CUDA driver and NVML as the plugin would load them. Raises as read_config."""
    settings = read_config(find_config(environ))
    named_driver = settings.get("driver", driver.DEFAULT_LIBRARY)
    named_nvml = settings.get("nvml", nvml.DEFAULT_LIBRARY)
    return str(named_driver), str(named_nvml)


def _toml(value: Scalar) -> str:
    """A JSON string, integer or boolean is a TOML one, with two exceptions: characters beyond 16
    bits stand as themselves, and DEL does not."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
