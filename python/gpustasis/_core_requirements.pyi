# SPDX-License-Identifier: Apache-2.0
"""Of gpustasis._core: what a restore needs. Source: src/bindings/bind_requirements.cpp; docstrings
are there. There is no module of this name."""

from collections.abc import Sequence
from enum import Enum
from os import PathLike
from typing import Final

class FilePlace(Enum):
    HOST = 0
    CONTAINER = 1
    INNER = 2

class FileIdentity(Enum):
    SIZE = 0
    BUILD_ID = 1
    CONTENT = 2

class RequiredFile:
    def __init__(
        self,
        *,
        place: FilePlace = ...,
        path: str,
        size: int,
        identity: FileIdentity = ...,
        id: bytes = ...,
    ) -> None: ...
    place: Final[FilePlace]
    path: Final[str]
    size: Final[int]
    identity: Final[FileIdentity]
    id: Final[bytes]

class Requirements:
    def __init__(self, *, files: Sequence[RequiredFile] = ..., unrecorded: int = 0) -> None: ...
    files: Final[list[RequiredFile]]
    unrecorded: Final[int]

def identity_text(file: RequiredFile) -> str: ...
def file_difference(root: str | PathLike[str], path: str, expected: RequiredFile) -> str | None: ...
