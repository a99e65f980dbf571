# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/operating.md for containerd work as they stand there."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.asked_again import UNFROZEN
from support.containerd_node import JOB_IMAGE, REGISTRY, ContainerdNode, Pod, wait_for
from support.engine_gpu import DEVICE
from support.engine_root import EngineRoot

HOME = Path("/srv/operator")
TIMEOUT_S = 240.0
# ctr pauses a task before it checkpoints it. Where that fails for want of processor time nothing
# else was done, so it is asked again.
ASK_AGAIN = f"""ctr() {{
    local end=$((SECONDS + 60))
    until command ctr "$@" 2>/tmp/ctr-errors; do
        if ! grep --quiet "{UNFROZEN}" /tmp/ctr-errors || [ $SECONDS -ge $end ]; then
            cat /tmp/ctr-errors >&2
            return 1
        fi
        sleep 0.1
    done
}}
"""


def blocks(document: Path, kind: str) -> list[str]:
    pattern = rf"^```sh {kind}\n(.*?)^```$"
    return re.findall(pattern, document.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory, job_program: Path) -> Iterator[ContainerdNode]:
    """A node on which gpustasis is not installed, and which runs default/trainer/job."""
    place = tmp_path_factory.mktemp("fresh")
    with EngineRoot(place) as root, ContainerdNode(root, job_program) as node:
        shutil.rmtree(root.path("/etc/criu"))
        root.path(HOME).mkdir(parents=True)
        # The registry speaks plain HTTP.
        root.write(
            "/etc/containers/registries.conf.d/local.conf",
            f'[[registry]]\nlocation = "{REGISTRY}"\ninsecure = true\n',
        )
        yield node


@pytest.fixture(scope="module")
def trainer(fresh: ContainerdNode) -> Pod:
    """The pod of the document; its container is "job"."""
    return fresh.pod("trainer", "default")


Shell = Callable[..., str]


@pytest.fixture(scope="module")
def shell(fresh: ContainerdNode) -> Shell:
    """shell(script, **variables): run it as an operator on the node; what it printed."""

    def run(script: str, **variables: str) -> str:
        return fresh.root.run(
            *("env", "--chdir", HOME, "bash", "-euc", ASK_AGAIN + script),
            environ=variables,
            timeout_s=TIMEOUT_S,
        ).stdout

    return run


def test_containerd(fresh: ContainerdNode, trainer: Pod, shell: Shell, repository: Path) -> None:
    job = trainer.job("job", "--mib", "4")
    install, checkpoint, image, resume, ctr, uninstall = blocks(
        repository / "docs/operating.md", "containerd"
    )
    shell(install)
    assert "1 image whole" in shell(checkpoint)
    job.run_on()
    shell(image, registry=REGISTRY)
    assert "is not paused" in shell(resume)

    last = job.steps()
    job.stop()
    job.remove()
    checkpoint_image = f"{REGISTRY}/trainer:checkpoint"
    fresh.pull(checkpoint_image)
    restored = fresh.pod("again", "default").create("job", checkpoint_image, [])
    restored.start()
    restored.run_on()
    assert int(restored.output()[0].split()[2]) <= last
    restored.stop()

    fresh.root.run("ctr", "images", "pull", "--plain-http", JOB_IMAGE)
    said = shell(ctr, gpu=DEVICE, image=JOB_IMAGE)
    assert "GPU memory" in said and "4 chunks" in said, said
    # It ends at the first byte that is wrong.
    wait_for(lambda: busy_ticks(fresh) > 10, "restored task that computes", fresh.log)
    fresh.root.run("ctr", "tasks", "kill", "--signal", "SIGKILL", "trainer")
    shell(uninstall)
    assert not fresh.root.path("/etc/criu/runc.conf").exists()


def busy_ticks(node: ContainerdNode) -> int:
    """Clock ticks that the task trainer of ctr's has computed, in user mode. Fails if it is
    gone."""
    listed = node.root.run("ctr", "tasks", "list").stdout.split()
    assert "trainer" in listed and "RUNNING" in listed, listed
    pid = listed[listed.index("trainer") + 1]
    return int(node.root.path(f"/proc/{pid}/stat").read_text().split()[13])  # proc(5): utime
