# SPDX-License-Identifier: Apache-2.0
"""Of gpustasis._core: signed checkpoints. Source: src/bindings/bind_signature.cpp; the docstrings
are there. There is no module of this name."""

from collections.abc import Callable, Sequence
from os import PathLike

STATEMENT_NAME: str
SIGNATURE_NAME: str
MAX_SIGNATURE_SIZE: int

class SignedBy:
    @property
    def subject(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def date(self) -> str: ...
    @property
    def warning(self) -> str: ...

class SignedStatement:
    @staticmethod
    def read(
        directory: str | PathLike[str], trusted: Sequence[bytes], *, own: bool = False
    ) -> SignedStatement: ...
    def check(
        self,
        directory: str | PathLike[str],
        *,
        for_others: bool = False,
        own: bool = False,
        threads: int = 0,
        progress: Callable[[int], object] | None = None,
    ) -> None: ...
    @property
    def by(self) -> SignedBy: ...
    @property
    def files(self) -> list[str]: ...
    @property
    def digest(self) -> bytes: ...
    @property
    def parent(self) -> bytes | None: ...

def is_left_unsigned(name: str) -> bool: ...
def make_statement(
    directory: str | PathLike[str],
    parent: str | PathLike[str] | None = None,
    threads: int = 0,
    progress: Callable[[int], object] | None = None,
) -> bytes: ...
def sign_statement(
    statement: bytes, key: str | PathLike[str], certificate: str | PathLike[str] | None = None
) -> tuple[bytes, SignedBy]: ...
def verify_statement(statement: bytes, signature: bytes, trusted: Sequence[bytes]) -> SignedBy: ...
def check_signer(certificate: bytes) -> SignedBy: ...
def write_signed(directory: str | PathLike[str], statement: bytes, signature: bytes) -> None: ...
