# SPDX-License-Identifier: Apache-2.0
"""What opens an envelope: a private key in a file, or a program that has the key."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import sys
import termios
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpustasis import process
from gpustasis._core import (
    MAX_KEY_RECORD_SIZE,
    DataKey,
    KeyMemoryError,
    OutputError,
    UnsupportedDataError,
    cms_part,
)
from gpustasis.criu.plugin import run_settings
from gpustasis.errors import SealError, UnsupportedError

COMMAND_TIMEOUT_S = 120.0  # a person may have to touch a token
_PKCS11 = "pkcs11:"
_PROBE_TIMEOUT_S = 30.0
_SAID = 400  # characters of what a program said, in an error


class KeySource(Protocol):
    """Where the data key comes from."""

    def unwrap(self, envelope: bytes, place: str) -> DataKey:
        """The key in `envelope`, the content of the file `place`. Raises SealError if it is
        damaged or for another key, or the private key cannot be used."""


@dataclass(frozen=True, slots=True)
class KeyFile:
    """A private key, PEM without a password, that nobody else may read."""

    path: Path

    def unwrap(self, envelope: bytes, place: str) -> DataKey:
        """See KeySource."""
        with sealed_errors(place):
            return DataKey.unwrap(envelope, self.path)


@dataclass(frozen=True, slots=True)
class KeyCommand:
    """A program that is given the CMS part of the envelope (DER) on stdin, and prints the
    key record, as `openssl cms -decrypt -inform DER` does."""

    argv: Sequence[str]

    def unwrap(self, envelope: bytes, place: str) -> DataKey:
        """See KeySource."""
        with sealed_errors(place):
            cms = cms_part(envelope)
        # A pipe for what it prints, which is secret: no file of it is swapped or left behind.
        reading, writing = os.pipe2(os.O_CLOEXEC)
        with contextlib.ExitStack() as opened:
            opened.callback(os.close, reading)
            os.set_blocking(reading, False)  # what it leaves running may hold the other end
            try:
                finished = self._run(cms, reading, writing)
            finally:
                os.close(writing)
            if finished.status != 0:
                said = finished.errors.strip()[-_SAID:]
                raise SealError(f"{self.argv[0]} did not open {place} ({finished.ending}): {said}")
            with sealed_errors(f"{place}, opened by {self.argv[0]}"):
                return DataKey.read_record(envelope, reading)

    def _run(self, cms: bytes, reading: int, writing: int) -> process.Finished:
        with open(os.memfd_create("gpustasis"), "w+b") as stdin:
            stdin.write(cms)
            stdin.seek(0)

            def watch() -> None:
                waiting = fcntl.ioctl(reading, termios.FIONREAD, bytes(4))
                if int.from_bytes(waiting, sys.byteorder) > MAX_KEY_RECORD_SIZE:
                    raise SealError(
                        f"{self.argv[0]} prints more than the {MAX_KEY_RECORD_SIZE} bytes of a key "
                        "record, and was killed"
                    )

            try:
                return process.run(
                    self.argv,
                    apart=True,
                    bounded=True,
                    stdin=stdin.fileno(),
                    stdout=writing,
                    timeout_s=COMMAND_TIMEOUT_S,
                    on_tick=watch,
                )
            except TimeoutError as exc:
                raise SealError(
                    f"{self.argv[0]} did not end within {COMMAND_TIMEOUT_S:g} s"
                ) from exc
            except OSError as exc:
                raise SealError(f"cannot run {self.argv[0]}: {exc.strerror}") from exc


@dataclass(frozen=True, slots=True)
class KeyToken:
    """A PKCS #11 URI. openssl uses the token, in a process of its own."""

    uri: str

    def unwrap(self, envelope: bytes, place: str) -> DataKey:
        """See KeySource. Raises UnsupportedError if openssl cannot use any token."""
        words = ("openssl", "cms", "-decrypt", "-inform", "DER")
        return KeyCommand([*words, *token_words(self.uri)]).unwrap(envelope, place)


def token_words(uri: str) -> list[str]:
    """Arguments for a command of openssl that takes a private key. Raises UnsupportedError."""
    ways = {
        ("list", "-providers", "-provider", "pkcs11"): (
            *("-provider", "pkcs11", "-provider", "default"),
            *("-inkey", uri),
        ),
        ("engine", "-t", "pkcs11"): ("-engine", "pkcs11", "-keyform", "engine", "-inkey", uri),
    }
    said = []
    for probe, words in ways.items():
        try:
            found = process.run(["openssl", *probe], apart=True, timeout_s=_PROBE_TIMEOUT_S)
        except (OSError, TimeoutError) as exc:
            raise UnsupportedError(f"{_shown(uri)}: cannot run openssl: {exc}") from exc
        if found.status == 0 and "[ unavailable ]" not in found.output:
            return list(words)
        said.append(found.errors.strip().splitlines()[0] if found.errors.strip() else probe[0])
    raise UnsupportedError(
        f"{_shown(uri)}: openssl can use no token: it has neither a provider nor an engine for "
        f"PKCS #11 (packages pkcs11-provider, libengine-pkcs11-openssl): {'; '.join(said)}"
    )


def _shown(uri: str) -> str:
    """Without a PIN."""
    return re.sub(r"(pin-value=)[^;&?]*", r"\1...", uri)


def is_token(name: object) -> bool:
    """Whether that is a PKCS #11 URI."""
    return str(name).startswith(_PKCS11)


class Remembered:
    """Another source, which is asked once for each key."""

    def __init__(self, source: KeySource) -> None:
        self._source = source
        self._found: dict[bytes, DataKey] = {}

    def unwrap(self, envelope: bytes, place: str) -> DataKey:
        """See KeySource."""
        if (found := self._found.get(envelope)) is None:
            found = self._found[envelope] = self._source.unwrap(envelope, place)
        return found


def configured_key(environ: Mapping[str, str]) -> KeySource | None:
    """The file that the plugin's configuration names as private_key. Raises CheckpointError if
    that cannot be read."""
    named = run_settings(environ).get("private_key")
    if isinstance(named, str) and is_token(named):
        return KeyToken(named)
    return KeyFile(Path(named)) if isinstance(named, str) and named.startswith("/") else None


def key_source(key: Path | None, command: str | None) -> KeySource:
    """Of a command line, which names just one of the two; `command` is split as a shell does, and
    run without one. Raises ValueError."""
    if key is not None and command is not None:
        raise ValueError("name one private key: --key or --key-command, not both")
    if command is not None:
        try:
            argv = shlex.split(command)
        except ValueError as exc:
            # Not the command itself: a password may be in it.
            raise ValueError(f"--key-command cannot be split into words: {exc}") from exc
        if argv:
            return KeyCommand(argv)
    elif key is not None:
        return KeyToken(str(key)) if is_token(key) else KeyFile(key)
    raise ValueError("name a private key: --key FILE, or --key-command 'PROGRAM ARGUMENTS'")


@contextlib.contextmanager
def sealed_errors(place: str) -> Iterator[None]:
    """Turn what _core raises of sealed files into our exceptions, with `place` in front. What
    cannot be written stays an OutputError: whoever makes that directory says which it is."""
    try:
        yield
    except OutputError:
        raise
    except KeyMemoryError as exc:  # no file is to blame
        raise SealError(str(exc)) from exc
    except UnsupportedDataError as exc:
        raise UnsupportedError(f"{place}: {exc}") from exc
    except (ValueError, OSError) as exc:  # CorruptDataError is a ValueError
        raise SealError(f"{place}: {exc}") from exc
