# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/planner.md work as they stand there, and the picture there is theirs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

_BLOCK = re.compile(r"^```sh plan\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_planner(repository: Path, tmp_path: Path) -> None:
    blocks = _BLOCK.findall((repository / "docs" / "planner.md").read_text())
    assert len(blocks) == 2
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ended = subprocess.run(
        ["bash", "-euc", "\n".join(blocks)],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    texts, _, document = ended.stdout.partition("\n{")
    assert "1,024 GPUs on 128 nodes, a failure every 28.8 h" in texts
    assert "16,384 GPUs on 2,048 nodes, a failure every 2.78 h" in texts
    assert (
        texts.count("gpustasis, to disk") == 3
    )  # in the second plan, of the interval asked for too
    assert json.loads("{" + document)["figures"]["detect_s"] == {"value": 60, "source": "option"}
    drawn = (tmp_path / "plan.svg").read_text()
    assert drawn == (repository / "docs" / "planner.svg").read_text()
