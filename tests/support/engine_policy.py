# SPDX-License-Identifier: Apache-2.0
"""The OCI hook in an EngineRoot, as an installation puts it there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gpustasis
from support.engine_root import EngineRoot

_HOOK = "/usr/libexec/gpustasis/oci-hook"
_DEFINITION = "/usr/share/containers/oci/hooks.d/50-gpustasis.json"
_LAUNCHER = """#!{python} -IS
import sys
sys.path.append({packages!r})
from gpustasis.oci_hook import main
sys.exit(main())
"""


def add_hook(root: EngineRoot) -> None:
    """For containers with annotations of ours; nothing for others."""
    packages = str(Path(gpustasis.__file__).resolve().parent.parent)
    root.write(_HOOK, _LAUNCHER.format(python=sys.executable, packages=packages), 0o755)
    definition = {
        "version": "1.0.0",
        "hook": {"path": _HOOK, "args": ["oci-hook"], "timeout": 30},
        "when": {"annotations": {r"^io\.gpustasis\.": ".*"}},
        "stages": ["createRuntime", "poststop"],
    }
    root.write(_DEFINITION, json.dumps(definition))


def remove_hook(root: EngineRoot) -> None:
    root.path(_DEFINITION).unlink()
    root.path(_HOOK).unlink()
