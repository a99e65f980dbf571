# SPDX-License-Identifier: Apache-2.0
"""CONTRIBUTING.md leads to the places it names: each file is there and holds the name beside it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_POINTER = re.compile(r"\[[^\]]+\]\(([^)#]+)\)(?:,\s+`([^`]+)`)?")


def pointers() -> list[tuple[str, str]]:
    page = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
    return sorted(set(_POINTER.findall(page.read_text())))


def test_there_are_pointers_with_names() -> None:
    assert sum(bool(name) for _, name in pointers()) >= 12


@pytest.mark.parametrize(("path", "name"), pointers())
def test_a_pointer_leads_there(repository: Path, path: str, name: str) -> None:
    assert (repository / path).is_file()
    lines = (repository / path).read_text().splitlines()
    code = "\n".join(line for line in lines if "#include" not in line)
    assert re.search(rf"(?<!\w){re.escape(name)}(?!\w)", code)
