# SPDX-License-Identifier: Apache-2.0
"""A pod on a KubernetesNode whose job checks its own GPU memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.container_logs import records, text_of
from support.containerd_node import LOGS, wait_for

if TYPE_CHECKING:
    from support.kubernetes_node import KubernetesNode


class GpuPod:
    """A pod with a container `job` that runs steady_job."""

    def __init__(self, node: KubernetesNode, name: str, namespace: str) -> None:
        self.node, self.name, self.namespace = node, name, namespace

    @property
    def path(self) -> str:
        return f"{self.namespace}/{self.name}/job"

    def status(self) -> Any:
        return self.node.get("pod", self.name, "--namespace", self.namespace)["status"]

    def container_id(self) -> str:
        """Of the container that runs now, as its runtime has it; empty: none does."""
        (found,) = self.status().get("containerStatuses", [{}])
        running = "running" in found.get("state", {})
        return str(found["containerID"]).split("//", 1)[1] if running else ""

    def wait_for_start(self) -> None:
        def runs() -> bool:
            status = self.status()
            why = f"{self.name}: {status.get('reason')}: {status.get('message')}"
            assert status.get("phase") != "Failed", f"{why}\n{self.story()}"
            return bool(status.get("phase") == "Running")

        wait_for(runs, f"running pod {self.name}", self.story)

    def story(self) -> str:
        words = ("--namespace", self.namespace)
        return (
            "\n".join([*self.output()[-3:], self.node.log()[-2500:]])
            + self.node.kubectl("describe", "pod", self.name, *words, check=False).stdout
        )

    def output(self) -> list[str]:
        """Lines that its container has written."""
        return [text_of(line) for line in self.lines()]

    def lines(self) -> list[str]:
        """As CRI has them: TIME STREAM F TEXT."""
        return [line for text in self._logs() for line in records(text)]

    def _logs(self) -> Iterator[str]:
        """What is in them. CRI-O 1.36 puts the log of a restored container beside the directory
        where a kubelet looks for it. A kubelet removes those of a deleted pod at any moment."""
        places = self.node.root.path(LOGS) / f"{self.namespace}_{self.name}_*/**/*.log"
        for place in sorted(glob(str(places), recursive=True)):
            with suppress(FileNotFoundError):
                yield Path(place).read_text("utf-8")

    def steps(self) -> int:
        """Steps said to be right. Fails if the job has said anything else."""
        said = [line for line in self.output() if "driver emulator" not in line]
        wrong = [line for line in said if not line.endswith(" ok")]
        assert not wrong, f"{self.name} says {wrong}"
        return len(said)

    def numbers(self, since: str = "") -> list[int]:
        """Those of its steps, said from that moment on (RFC 3339, UTC). A container that
        containerd restores begins with the log of the one that was checkpointed."""
        lines = [line for line in self.lines() if line >= since]
        found = (re.search(r"step (\d+) ok", line) for line in lines)
        return [int(match[1]) for match in found if match]

    def run_on(self, steps: int = 3) -> None:
        """Wait until it has made that many steps more, each of them right: its memory is."""
        wanted = self.steps() + steps
        wait_for(lambda: self.steps() >= wanted, f"{steps} steps of {self.name}", self.story)

    def failure(self) -> str:
        """Why its container could not be started; empty: it was not tried, or it was."""
        return " ".join(text for text in self.events_of("Failed") if text.startswith("Error"))

    def events_of(self, reason: str) -> list[str]:
        words = ("get", "events", "--namespace", self.namespace, "--output", "json")
        chosen = f"--field-selector=involvedObject.name={self.name},reason={reason}"
        found = json.loads(self.node.kubectl(*words, chosen).stdout)["items"]
        return [one["message"] for one in found]

    def events(self) -> str:
        """What the cluster has noted about it."""
        words = ("get", "events", "--namespace", self.namespace)
        chosen = f"--field-selector=involvedObject.name={self.name}"
        messages = "--output=jsonpath={.items[*].message}"
        return self.node.kubectl(*words, chosen, messages).stdout

    def delete(self) -> None:
        words = ("--namespace", self.namespace, "--grace-period", "0", "--force", "--wait=true")
        self.node.kubectl("delete", "pod", self.name, *words)
