# SPDX-License-Identifier: Apache-2.0
"""Another plugin for criu, beside ours."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from campaigns.rig import Rig
from gpustasis.criu.plugin import PLUGIN_NAME, plugin_directory


def with_plugin_before(rig: Rig, plugin: Path, words: list[str]) -> list[str]:
    """A command of criu's, with `plugin` asked before ours: criu takes them in the order in which
    the directory lists them."""
    ours = plugin_directory(rig.environ)
    both = rig.images()
    shutil.copy(plugin, both / "first.so")
    shutil.copy(ours / PLUGIN_NAME, both)
    for number in range(100):
        if os.listdir(both)[-1] == PLUGIN_NAME:
            break
        shutil.copy(plugin, both / f"{number}.so")
    changed = [str(both) if word == str(ours) else word for word in words]
    assert str(both) in changed
    return changed
