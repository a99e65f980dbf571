# SPDX-License-Identifier: Apache-2.0
"""What a host has and lacks for checkpoint and restore: findings, which `gpustasis doctor`
prints."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """ok: as it should be. note: worth knowing, hinders nothing. problem: something will fail."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """name: what was looked at; text: what was found; remedy: what to do, empty if nothing."""

    name: str
    status: Status
    text: str
    remedy: str = ""


def ok(name: str, text: str) -> Finding:
    """All is well."""
    return Finding(name=name, status=Status.OK, text=text)


def note(name: str, text: str, remedy: str = "") -> Finding:
    """Worth knowing; nothing fails of it."""
    return Finding(name=name, status=Status.NOTE, text=text, remedy=remedy)


def problem(name: str, text: str, remedy: str) -> Finding:
    """Something fails of it, until `remedy` is done."""
    return Finding(name=name, status=Status.PROBLEM, text=text, remedy=remedy)
