# SPDX-License-Identifier: Apache-2.0
"""The control-group hierarchies of this machine stay the same for as long as tests run.

An engine's root (engine_root.sh) mounts the v1 hierarchy of hugetlb where there is none, and the
kernel makes it then, for every process of the machine, and takes it away with its last mount. CRIU
reads /proc/cgroups once, at the begin of a dump, and /proc/PID/cgroup of each task later: a
hierarchy that has come between the two fails the dump with "cg: controller hugetlb not found",
whoever's it is. So what engine_root.sh would mount is mounted before the first test and until after
the last.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

_KEEP = """
mount -t tmpfs tmpfs /mnt
mkdir /mnt/hugetlb
mount -t cgroup -o hugetlb cgroup /mnt/hugetlb
echo kept
read -r forever
"""


class KeptHierarchy:
    """That of hugetlb, in a mount namespace of its own, until close() or the end of this
    process."""

    def __init__(self) -> None:
        """Raises OSError if it cannot be mounted."""
        self._keeper = subprocess.Popen(
            ["unshare", "--mount", "sh", "-ec", _KEEP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != "kept\n":
            raise OSError(f"the hierarchy of hugetlb cannot be mounted: {self.close()}")

    def close(self) -> str:
        """What mount(8) said."""
        return self._keeper.communicate()[1]


def is_needed() -> bool:
    """Whether engine_root.sh would mount one: beside other v1 hierarchies, where the kernel has
    hugetlb and nobody has mounted it for all to see."""
    kinds = [
        line.partition(" - ")[2].split()
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    ]
    mounted = [options.split(",") for kind, _, options in kinds if kind == "cgroup"]
    known = Path("/proc/cgroups").read_text(encoding="utf-8")
    return bool(mounted) and "\nhugetlb" in known and not any("hugetlb" in one for one in mounted)
