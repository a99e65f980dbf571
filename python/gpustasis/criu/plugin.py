# SPDX-License-Identifier: Apache-2.0
"""Configuration: our plugin's, and where the plugin lies; and CRIU's, as criu would read it.

The grammar of CRIU's files is that of criu(8), CONFIGURATION FILES: an option a line, its long name
without dashes, then its value after blanks or "="; "#" starts a comment. criu ends with exit status
1 where a line is none of this, and so does a dump that a runtime has asked for.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpustasis import driver, nvml
from gpustasis.errors import CheckpointError, CriuError, UnsupportedError

PLUGIN_NAME = "cuda_plugin.so"
SYSTEM_CONFIG = Path("/etc/gpustasis/config.toml")
OVERRIDES = "GPUSTASIS_OVERRIDES"  # a file whose keys win over all other files and policies

Scalar = bool | int | str
Setting = Scalar | Sequence[str]  # of the configuration: a plain value, or a list of words


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


def rank_script() -> Path:
    """CRIU's action script for containers that are ranks of a job. Raises UnsupportedError if it is
    not there."""
    path = Path(__file__).resolve().parent.parent / "libexec" / "rank-script"
    if not path.is_file():
        raise UnsupportedError(f"{path} is missing; install gpustasis anew")
    return path


def find_config(environ: Mapping[str, str] | None = None) -> Path | None:
    """The configuration that the plugin would read by itself; None: its defaults."""
    env = os.environ if environ is None else environ
    named = env.get("GPUSTASIS_CONFIG")
    if named:
        return Path(named)
    return SYSTEM_CONFIG if SYSTEM_CONFIG.exists() else None


def read_config(path: Path | None) -> dict[str, Setting]:
    """What the file sets, by key; None: nothing. The plugin alone knows which keys there are.

    Raises CheckpointError if it cannot be read, or holds more than plain values and lists of words.
    """
    if path is None:
        return {}
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:  # ValueError: not UTF-8, or not TOML
        raise CheckpointError(f"cannot read the configuration {path}: {exc}") from exc
    for key, value in settings.items():
        words = isinstance(value, list) and all(isinstance(word, str) for word in value)
        if not words and not isinstance(value, bool | int | str):
            raise CheckpointError(
                f"configuration {path}: the value of {key!r} is neither a plain one nor a list of "
                "words"
            )
    return settings


def run_settings(environ: Mapping[str, str]) -> dict[str, Setting]:
    """What the plugin would read of its configuration in a run of criu's with this environment, but
    for policies of containers and options of criu's. Raises CheckpointError."""
    named = environ.get(OVERRIDES)
    return {
        **read_config(find_config(environ)),
        **read_config(Path(named) if named else None),
    }


def format_config(settings: Mapping[str, Setting]) -> str:
    """The TOML text that sets these."""
    return "".join(f"{_toml(key)} = {_toml(value)}\n" for key, value in settings.items())


def driver_libraries(environ: Mapping[str, str] | None = None) -> tuple[str, str]:
    """The CUDA driver and NVML as the plugin would load them. Raises as read_config."""
    settings = read_config(find_config(environ))
    named_driver = settings.get("driver", driver.DEFAULT_LIBRARY)
    named_nvml = settings.get("nvml", nvml.DEFAULT_LIBRARY)
    return str(named_driver), str(named_nvml)


def _toml(value: Setting) -> str:
    """A JSON string, integer, boolean or array of strings is a TOML one, with two exceptions:
    characters beyond 16 bits stand as themselves, and DEL does not."""
    plain = value if isinstance(value, bool | int | str) else list(value)
    return json.dumps(plain, ensure_ascii=False).replace("\x7f", "\\u007f")


# What criu reads by itself; what runc, and crun from 1.26 on, name in their requests. crun takes
# its own file if there is one, else that of runc. Later files win over earlier ones.
DEFAULT_FILE = "/etc/criu/default.conf"
RUNC_FILE = "/etc/criu/runc.conf"
CRUN_FILE = "/etc/criu/crun.conf"


@dataclass(frozen=True, slots=True)
class Option:
    """line: counted from 1. name: the long one, without dashes. value: empty if there is none."""

    line: int
    name: str
    value: str

    def __str__(self) -> str:
        return f"{self.name} {self.value}".strip()


def parse_options(text: str, origin: str) -> list[Option]:
    """All options in the order of their lines; of one that stands twice, criu takes the last.

    origin: the file's name, for errors. Raises CriuError that names the line criu would choke on.
    """
    options = []
    for number, line in enumerate(text.split("\n"), 1):
        words = _words(line, f"{origin}, line {number}")
        if not words:
            continue
        name, equals, value = words[0].partition("=")
        if name.startswith("-") or not name:
            raise CriuError(
                f"{origin}, line {number}: {words[0]!r} is not the name of an option; "
                "options stand without dashes"
            )
        values = [value, *words[1:]] if equals else words[1:]
        if len(values) > 1:
            raise CriuError(
                f"{origin}, line {number}: {line.strip()!r}: an option has one value at most"
            )
        options.append(Option(number, name, values[0] if values else ""))
    return options


def _words(line: str, where: str) -> list[str]:
    r"""Words between blanks, up to a comment; a word in double quotes may hold blanks and \"."""
    words = []
    rest = line.strip()
    while rest and not rest.startswith("#"):
        if rest.startswith('"'):
            end = 1
            while end < len(rest) and (rest[end] != '"' or rest[end - 1] == "\\"):
                end += 1
            if end == len(rest):
                raise CriuError(f"{where}: a quote is not closed")
            words.append(rest[1:end].replace('\\"', '"'))
            rest = rest[end + 1 :].lstrip()
        else:
            word, *others = rest.split(None, 1)
            words.append(word)
            rest = others[0] if others else ""
    return words
