"""Fixtures of the tests that run container engines.

engines     support.engine_root.EngineRoot, one for the whole run, with the test image in it
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.engine_image import import_image
from support.engine_root import EngineRoot


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineRoot]:
    with EngineRoot(tmp_path_factory.mktemp("engines")) as root:
        import_image(root)
        yield root
