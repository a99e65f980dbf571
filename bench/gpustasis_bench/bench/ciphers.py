# SPDX-License-Identifier: Apache-2.0
"""Programs that encrypt a checkpoint of stock CRIU's afterwards, as people do without sealing."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gpustasis import process
from gpustasis.errors import UnsupportedError
from gpustasis_bench.bench.timing import TimedRun, run_timed
from gpustasis_bench.errors import BenchError

_TIMEOUT_S = 900.0
_FILE = "checkpoint.tar.sealed"
# What the benchmark itself reads after a dump stays: CRIU's statistics and the plugin's.
_PACK = (
    "set -eo pipefail; tar -C {images} -cf - . | {encrypt} >{file}.part; "
    "find {images} -type f -name '*.img' -delete; mv {file}.part {images}/{name}"
)
_UNPACK = "set -eo pipefail; {decrypt} <{file} | tar -C {images} -xf -"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cipher:
    """encrypt, decrypt: shell words, from standard input to standard output. program: of these, to
    be installed; package: the one that has it. asks_version: what it says its version to."""

    program: str
    package: str
    encrypt: str
    decrypt: str
    asks_version: str = "--version"

    def version(self) -> str:
        """As the program says: "1.1.1"."""
        said = process.run([self.program, self.asks_version], timeout_s=30).output
        found = re.search(r"\d+(?:\.\d+)+", said)
        return found[0] if found else "unknown"

    def require(self) -> None:
        """Raises UnsupportedError if the program is not installed."""
        if shutil.which(self.program) is None:
            raise UnsupportedError(
                f"{self.program} is not installed: apt-get install {self.package}"
            )

    def pack(self, images: Path, output: Path) -> TimedRun:
        """Put all files of a checkpoint into one, encrypted, and remove CRIU's in the clear."""
        file = images.with_name(f"{images.name}-{_FILE}")
        return _run(_PACK, output, images=images, file=file, name=_FILE, encrypt=self.encrypt)

    def unpack(self, images: Path, output: Path) -> TimedRun:
        """Bring them back as they were."""
        return _run(_UNPACK, output, images=images, file=images / _FILE, decrypt=self.decrypt)


def _run(script: str, output: Path, **words: Path | str) -> TimedRun:
    quoted = {
        name: shlex.quote(os.fspath(word)) if isinstance(word, Path) else word
        for name, word in words.items()
    }
    return run_timed(["bash", "-c", script.format(**quoted)], os.environ, output, _TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class Keys:
    """What the contenders encrypt for. certificate and key: a recipient of sealed checkpoints."""

    certificate: Path
    key: Path
    ciphers: dict[str, Cipher]
    home: Path


def make_keys(folder: Path) -> Keys:
    """Make keys in the new directory `folder`. Raises UnsupportedError without one of the programs,
    BenchError if one fails."""
    folder.mkdir(mode=0o700)
    certificate, key = folder / "recipient.pem", folder / "recipient.key"
    identity, secret = folder / "age.key", folder / "secret"
    # gpg talks to its agent by a socket in there, whose path has at most 107 bytes.
    home = Path(tempfile.mkdtemp(prefix="gpustasis-gpg-", dir="/tmp"))
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32) + "\n", encoding="ascii")
    paths = {"identity": identity, "secret": secret, "home": home}
    quoted = {name: shlex.quote(str(path)) for name, path in paths.items()}
    gpg = "gpg --batch --homedir {home} --pinentry-mode loopback --passphrase-file {secret} "
    openssl = "openssl enc {how} -aes-256-ctr -pbkdf2 -pass file:{secret}"
    ciphers = {
        "age": Cipher(
            program="age",
            package="age",
            encrypt="age --encrypt -i {identity}".format(**quoted),
            decrypt="age --decrypt -i {identity}".format(**quoted),
        ),
        "gpg": Cipher(
            program="gpg",
            package="gpg",
            encrypt=(gpg + "--symmetric --cipher-algo AES256 --compress-algo none").format(
                **quoted
            ),
            decrypt=(gpg + "--decrypt").format(**quoted),
        ),
        "openssl enc": Cipher(
            program="openssl",
            package="openssl",
            encrypt=openssl.format(how="-e", **quoted),
            decrypt=openssl.format(how="-d", **quoted),
            asks_version="version",
        ),
    }
    for cipher in ciphers.values():
        cipher.require()
    subject = ["-subj", "/CN=gpustasis-bench", "-days", "2"]
    _make(
        ["openssl", "req", "-x509", "-newkey", "rsa:3072", "-nodes", *subject],
        ["-keyout", str(key), "-out", str(certificate)],
    )
    key.chmod(0o600)
    _make(["age-keygen"], ["-o", str(identity)])
    return Keys(certificate, key, ciphers, home)


def end_agent(keys: Keys) -> None:
    """gpg leaves a process behind, which serves its directory: that goes with it."""
    process.run(["gpgconf", "--homedir", str(keys.home), "--kill", "all"], timeout_s=30)
    shutil.rmtree(keys.home)


def _make(words: list[str], more: list[str]) -> None:
    ended = process.run([*words, *more], timeout_s=60)
    if ended.status != 0:
        raise BenchError(f"{words[0]} made no key ({ended.ending}): {ended.output.strip()[-300:]}")


def aes_gcm_rate() -> int:
    """Bytes a second that all cores encrypt with AES-256-GCM, in blocks of 32 KiB: `openssl speed`,
    the best of three. Raises BenchError."""
    words = ["openssl", "speed", "-mr", "-elapsed", "-seconds", "1", "-bytes", "32768"]
    words += ["-multi", str(len(os.sched_getaffinity(0))), "-evp", "aes-256-gcm"]
    rates = []
    for _ in range(3):
        done = process.run(words, timeout_s=60)
        # A line for each process, and one for all of them, which begins with +F.
        found = re.findall(r"^\+F:\d+:AES-256-GCM:([0-9.]+)$", done.output, re.MULTILINE)
        if done.status != 0 or len(found) != 1:
            raise BenchError(f"openssl speed: no rate of AES-256-GCM: {done.output.strip()[-300:]}")
        rates.append(float(found[0]))
    return round(max(rates))
