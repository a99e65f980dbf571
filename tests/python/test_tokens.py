# SPDX-License-Identifier: Apache-2.0
"""Private keys in a token, named by a PKCS #11 URI: it opens what is sealed, and signs."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpustasis.sealing.directory import key_for_criu
from gpustasis.sealing.keys import KeyToken, configured_key
from support.chains import make_link, memory_of
from support.command import call
from support.signatures import require_signed
from support.tokens import Token


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Token:
    found = Token.make(tmp_path / "token")
    for name, value in found.environ.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_link(tmp_path / "one", {7: memory_of(["a1", "0", "A2"])})
    return tmp_path / "one"


@pytest.mark.parametrize("kind", ["rsa", "ec"])
def test_a_key_that_never_leaves_its_token(
    kind: str, token: Token, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, uri = token.make_key("me", kind), token.uri("me")
    sealed, opened = tmp_path / "sealed", tmp_path / "opened"
    assert call("seal", checkpoint, "--to", certificate, "-o", sealed).exit_code == 0
    done = call("unseal", sealed, "--key", uri, "-o", opened)
    assert done.exit_code == 0, done.output
    for path in checkpoint.iterdir():
        assert (opened / path.name).read_bytes() == path.read_bytes()
    done = call("sign", opened, "--key", uri, "--certificate", certificate)
    assert done.exit_code == 0, done.output
    require_signed(opened, certificate)
    # As `gpustasis restore` hands it to criu: the data key alone.
    config = tmp_path / "config.toml"
    config.write_text(f'private_key = "{uri}"\n')
    monkeypatch.setenv("GPUSTASIS_CONFIG", str(config))
    with key_for_criu(sealed, None) as (named, handed_on):
        assert named == f"fd:{handed_on[0]}"


def test_what_cannot_be_used_is_said(
    token: Token, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = token.make_key("me", "ec")
    sealed, out = tmp_path / "sealed", tmp_path / "out"
    assert call("seal", checkpoint, "--to", certificate, "-o", sealed).exit_code == 0
    other = token.make_key("other", "ec")
    for uri in (token.uri("nobody"), token.uri("other")):
        done = call("unseal", sealed, "--key", uri, "-o", out)
        assert done.exit_code == 14 and "openssl did not open" in done.output, done.output
    done = call("sign", checkpoint, "--key", token.uri("other"), "--certificate", certificate)
    assert done.exit_code == 14, done.output
    done = call("sign", checkpoint, "--key", token.uri("other"))
    assert done.exit_code == 2 and "needs --certificate" in done.output
    assert not out.exists() and not (checkpoint / "gpustasis-statement.txt").exists()
    assert other.exists()


def test_without_a_provider_or_an_engine(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where neither package is there; the PIN of a URI is not shown."""
    for name in ("OPENSSL_MODULES", "OPENSSL_ENGINES"):
        monkeypatch.setenv(name, str(tmp_path))
    words = ("--key", "pkcs11:object=me?pin-value=1357", "--certificate", tmp_path / "me.pem")
    done = call("sign", checkpoint, *words)
    assert done.exit_code == 20
    assert "libengine-pkcs11-openssl" in done.output and "pin-value=..." in done.output
    assert "1357" not in done.output


def test_a_configuration_that_names_one(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('private_key = "pkcs11:object=me"\n')
    assert configured_key({"GPUSTASIS_CONFIG": str(config)}) == KeyToken("pkcs11:object=me")
