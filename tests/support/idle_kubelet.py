# SPDX-License-Identifier: Apache-2.0
"""When a kubelet has done what it does by itself."""

from __future__ import annotations

import re
import time

from support.containerd_node import wait_for
from support.kubernetes_node import NODE, KubernetesNode

_IDLE_S = 3.0
_POLL_S = 0.5
# How often it has brought a pod up to date, a number for each kind of cause.
_SYNCS = re.compile(r"^kubelet_pod_worker_duration_seconds_count\{.*\} (\d+)$", re.MULTILINE)
_NO_POD = "\nkubelet_running_pods 0\n"


def wait_until_idle(cluster: KubernetesNode) -> None:
    """Until it has brought no pod up to date for a while. One that has just started is looked at
    again, and a kubelet that is cut off in that tries it again a few seconds later."""
    words = ("get", "--raw", f"/api/v1/nodes/{NODE}/proxy/metrics")
    before, since = "", time.monotonic()

    def is_idle() -> bool:
        nonlocal before, since
        time.sleep(_POLL_S)
        now = time.monotonic()  # before it is asked: what happens meanwhile counts as later
        said = cluster.kubectl(*words).stdout
        syncs = " ".join(_SYNCS.findall(said))
        if syncs != before or not (syncs or _NO_POD in said):
            before, since = syncs, time.monotonic()
        return now - since >= _IDLE_S

    wait_for(is_idle, "idle kubelet", cluster.log)
