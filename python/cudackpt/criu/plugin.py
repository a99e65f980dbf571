"""Our CRIU plugin: where it lies, and its configuration for one run."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from cudackpt.errors import CheckpointError, UnsupportedError

PLUGIN_NAME = "cuda_plugin.so"
SYSTEM_CONFIG = Path("/etc/cudackpt/config.toml")

Scalar = bool | int | str


def plugin_directory(environ: Mapping[str, str] | None = None) -> Path:
    """The directory to give to criu as --libdir: CUDACKPT_PLUGIN_DIR, else the package's own.

    Raises UnsupportedError if the plugin is not there.
    """
    env = os.environ if environ is None else environ
    named = env.get("CUDACKPT_PLUGIN_DIR")
    directory = Path(named) if named else Path(__file__).resolve().parent.parent / "plugin"
    if not (directory / PLUGIN_NAME).is_file():
        raise UnsupportedError(
            f"{directory / PLUGIN_NAME} is missing; "
            + ("CUDACKPT_PLUGIN_DIR names that place" if named else "install cudackpt anew")
        )
    return directory.absolute()


def find_config(environ: Mapping[str, str] | None = None) -> Path | None:
    """The configuration that the plugin would read by itself; None: its defaults."""
    env = os.environ if environ is None else environ
    named = env.get("CUDACKPT_CONFIG")
    if named:
        return Path(named)
    return SYSTEM_CONFIG if SYSTEM_CONFIG.exists() else None


def merge_config(base: Path | None, overrides: Mapping[str, Scalar]) -> str:
    """The text of a configuration that says what `base` says, but for `overrides`.

    The plugin checks keys and values; here they are only put together.
    Raises CheckpointError if base cannot be read.
    """
    settings: dict[str, Scalar] = {}
    if base is not None:
        try:
            settings = tomllib.loads(base.read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:  # ValueError: not UTF-8, or not TOML
            raise CheckpointError(f"cannot read the configuration {base}: {exc}") from exc
    settings |= overrides
    for key, value in settings.items():
        if not isinstance(value, bool | int | str):
            raise CheckpointError(f"configuration {base}: the value of {key!r} is not a plain one")
    # A JSON string, integer or boolean is a TOML one, and so is a quoted key.
    lines = (f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in settings.items())
    return "".join(lines)
