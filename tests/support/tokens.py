# SPDX-License-Identifier: Apache-2.0
"""A token in software (SoftHSM), with keys that were made in it and never leave it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_PIN = "246810"
_MODULES = [
    Path(folder) / "softhsm/libsofthsm2.so"
    for folder in ("/usr/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")
]
_TYPES = {"rsa": "rsa:2048", "ec": "EC:prime256v1"}


@dataclass(frozen=True, slots=True)
class Token:
    """directory: its own. environ: of programs that use it."""

    directory: Path
    environ: dict[str, str]

    @classmethod
    def make(cls, directory: Path) -> Token:
        directory.mkdir()
        (directory / "objects").mkdir()
        config = directory / "softhsm2.conf"
        config.write_text(
            f"directories.tokendir = {directory / 'objects'}\nobjectstore.backend = file\n"
        )
        (directory / "pin").write_text(_PIN)
        module = next(path for path in _MODULES if path.exists())
        token = cls(directory, {"SOFTHSM2_CONF": str(config), "PKCS11_MODULE_PATH": str(module)})
        token._run(
            *("softhsm2-util", "--init-token", "--free", "--label", "gpustasis"),
            *("--pin", _PIN, "--so-pin", "13579111"),
        )
        return token

    def uri(self, name: str) -> str:
        return (
            f"pkcs11:token=gpustasis;object={name};type=private?pin-source=file:"
            f"{self.directory / 'pin'}"
        )

    def make_key(self, name: str, kind: str) -> Path:
        """kind: "rsa" or "ec". Its certificate."""
        self._run(
            *("pkcs11-tool", "--module", self.environ["PKCS11_MODULE_PATH"], "--login"),
            *("--pin", _PIN, "--token-label", "gpustasis", "--keypairgen"),
            *("--key-type", _TYPES[kind], "--label", name),
            *("--usage-sign", "--usage-derive", "--usage-decrypt"),
        )
        certificate = self.directory / f"{name}.pem"
        self._run(
            *("openssl", "req", "-new", "-x509", "-subj", f"/CN={name}", "-days", "2"),
            *("-engine", "pkcs11", "-keyform", "engine", "-key", self.uri(name)),
            *("-out", str(certificate)),
        )
        return certificate

    def _run(self, *words: str) -> None:
        done = subprocess.run(
            words, env=os.environ | self.environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
