# SPDX-License-Identifier: Apache-2.0
"""What commands print with --json, held against the schema that the package ships."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

import jsonschema


@cache
def schema() -> dict[str, Any]:
    text = resources.files("gpustasis.cli").joinpath("output.schema.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def check_document(text: str, command: str) -> dict[str, Any]:
    """The one document in `text`, which is as the schema says, and is of `command`."""
    found: dict[str, Any] = json.loads(text)
    jsonschema.Draft202012Validator(schema()).validate(found)
    assert found["command"] == command
    return found
