# SPDX-License-Identifier: Apache-2.0
"""CONTRIBUTING.md leads to the places it names: each file is there and holds the name beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_POINTER = re.compile(r"\[[^\]]+\]\(([^)#]+)\)(?:,\s+`([^`]+)`)?")
_QUOTED = re.compile(r"`([^`]+)`")
_PATH = re.compile(r"[\w.-]+(/[\w.-]+)+")
_BUILT = "build/"  # what is not there before `make build`
_PAGE = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text()


def pointers() -> list[tuple[str, str]]:
    return sorted(set(_POINTER.findall(_PAGE)))


def quoted_paths() -> list[str]:
    text = re.sub(r"^```.*?^```$", "", _PAGE, flags=re.MULTILINE | re.DOTALL)
    words = {word for quoted in _QUOTED.findall(text) for word in quoted.split()}
    return sorted(word for word in words if _PATH.fullmatch(word) and not word.startswith(_BUILT))


def without_comments(path: Path) -> str:
    """Its lines but those that only say something, and includes."""
    lines = path.read_text().splitlines()
    if path.suffix in {".cpp", ".hpp"}:
        code = [re.sub(r"//.*", "", line) for line in lines if "#include" not in line]
    else:
        code = [line for line in lines if not line.lstrip().startswith("#")]
    return "\n".join(code)


def test_there_are_pointers_with_names() -> None:
    assert sum(bool(name) for _, name in pointers()) >= 12
    assert len(quoted_paths()) >= 8


@pytest.mark.parametrize(("path", "name"), pointers())
def test_a_pointer_leads_there(repository: Path, path: str, name: str) -> None:
    assert (repository / path).is_file()
    if name:
        code = without_comments(repository / path)
        assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", code)


@pytest.mark.parametrize("path", quoted_paths())
def test_a_path_is_there(repository: Path, path: str) -> None:
    assert (repository / path).exists()
