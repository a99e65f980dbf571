# SPDX-License-Identifier: Apache-2.0
"""A throw-away Debian system with the container engines in it, in namespaces of its own.

It is ci/test-root's root `engines` under an overlay, entered with private mount, pid, ipc, uts, net
and cgroup namespaces: engine_root.sh says what is in it. All that it wrote, its processes, mounts
and control groups are gone when it is closed, or when this process is. Its network is a loopback
device.

The package under test is in it: `gpustasis` and `python` of the environment that runs the tests, at
their own paths.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from gpustasis_bench.roots import roots_directory

TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 180.0  # engine_root.sh waits for half of it
SCRIPT = Path(__file__).with_name("engine_root.sh")
ENVIRON = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "PODMAN_IGNORE_CGROUPSV1_WARNING": "1",
}
# Podman without systemd and its journal.
_CONTAINERS_CONF = """[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
[containers]
log_driver = "k8s-file"
"""
# $1: the system's init. Its control groups first, then its namespaces; a working directory or a
# descriptor of the old system must not come along.
_ENTER = """
init=$1 groups=/proc/$1/root/sys/fs/cgroup
shift
for group in $groups/*; do
    [ -e $groups/cgroup.procs ] && group=$groups/init
    echo $$ >$group/cgroup.procs || exit 125
done
unified=/proc/$init/root/run/unified/cgroup.procs
[ ! -e $unified ] || echo $$ >$unified || exit 125
exec nsenter --target $init --mount --pid --ipc --uts --net --cgroup -- "$@"
"""
_numbers = itertools.count()


class EngineRoot:
    """One such system, from start to close(); a context manager.

    place: an empty directory that it is mounted over.
    binds: host directories or files that it sees: path inside -> path here. They are read-only, but
        for those in `shared`, by the same rule.
    suite: the root's name in ci/test-root: "engines", or "kubernetes", which has more.
    """

    def __init__(
        self,
        place: Path,
        binds: Mapping[str, Path] | None = None,
        shared: Mapping[str, Path] | None = None,
        suite: str = "engines",
    ) -> None:
        lower = roots_directory() / suite
        assert lower.is_dir(), f"{lower} is missing; ci/test-root {suite} makes it"
        self.name = f"gpustasis-engines-{os.getpid()}-{next(_numbers)}"
        words = [f"ro:{path}" for path in _python_paths()]
        words += [f"ro:{here}:{inside}" for inside, here in (binds or {}).items()]
        words += [f"rw:{here}:{inside}" for inside, here in (shared or {}).items()]
        self._services: list[subprocess.Popen[str]] = []
        self._log = place.with_name(place.name + ".log").open("w+")
        self._keeper = subprocess.Popen(
            [
                *["unshare", "--mount", "--propagation", "private", str(SCRIPT), "outer"],
                *[str(place), self.name, str(lower), *words],
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self._wait_for_init()
        self._install_package()
        self.write("/etc/containers/containers.conf", _CONTAINERS_CONF)

    def _wait_for_init(self) -> None:
        assert self._keeper.stdout is not None
        said = self._keeper.stdout.readline().split()
        if len(said) != 2 or said[1] != "ready":
            self.close()
            raise AssertionError(f"the engines' root did not start:\n{self._said()}")
        self.init = int(said[0])

    def reboot(self) -> None:
        """As the loss of power does it, and the start that follows: every process is killed at
        once; mounts, networks and what lies in a tmpfs are gone; what is on the disk stays."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.write("reboot\n")
        self._keeper.stdin.flush()
        self._wait_for_init()
        for service in self._services:
            service.wait(CLOSE_TIMEOUT_S)
        self._services.clear()

    def path(self, inside: str | Path) -> Path:
        """Where something of this system is seen from here, links not followed."""
        return Path(f"/proc/{self.init}/root") / str(inside).lstrip("/")

    def write(self, inside: str | Path, text: str, mode: int = 0o644) -> None:
        """Make a file in this system, and the directories above it."""
        path = self.path(inside)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)

    def command(self, *argv: str | Path) -> list[str]:
        """The words that run argv in this system, whose environment is the caller's."""
        return ["sh", "-c", _ENTER, "sh", str(self.init), *map(str, argv)]

    def start(
        self, *argv: str | Path, environ: Mapping[str, str] | None = None, **keys: object
    ) -> subprocess.Popen[str]:
        """Start a program in this system, in a session of its own; keys are Popen's."""
        return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
            self.command(*argv),
            env=ENVIRON | dict(environ or {}),
            stdin=keys.pop("stdin", subprocess.DEVNULL),
            text=True,
            start_new_session=True,
            **keys,
        )

    def serve(self, *argv: str | Path) -> None:
        """Start a program that runs until this system ends; what it says is in /tmp/NAME.log."""
        with open(self.path(f"/tmp/{Path(argv[0]).name}.log"), "a") as log:
            self._services.append(self.start(*argv, stdout=log, stderr=log))

    def run(
        self,
        *argv: str | Path,
        check: bool = True,
        environ: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in this system to its end. With `check`, fail the test if it fails."""
        # Files, not pipes: a daemon that it leaves behind may hold them open.
        said = self.path(f"/tmp/.run-{next(_numbers)}")
        with open(f"{said}-out", "w+") as out, open(f"{said}-err", "w+") as err:
            child = self.start(*argv, environ=environ, stdout=out, stderr=err)
            try:
                status = child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                status = -signal.SIGALRM
            out.seek(0)
            err.seek(0)
            done = subprocess.CompletedProcess(list(argv), status, out.read(), err.read())
        words = " ".join(map(str, argv))
        assert not check or status == 0, f"{words}: status {status}\n{done.stdout}{done.stderr}"
        return done

    def close(self) -> None:
        """End every process of this system and remove what was made for it."""
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        self._keeper.stdin.close()
        status = self._keeper.wait(CLOSE_TIMEOUT_S)
        self._keeper.stdout.close()
        for service in self._services:
            service.wait(CLOSE_TIMEOUT_S)
        said = self._said()
        self._log.close()
        assert status == 0 and "still in use" not in said, f"status {status}\n{said}"

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def _install_package(self) -> None:
        """Let the names by which the environment's Python is started mean the same in there."""
        for link in _links(Path(sys.prefix) / "bin/python"):
            inside = self.path(link)
            if not link.is_relative_to(sys.prefix):
                inside.parent.mkdir(parents=True, exist_ok=True)
                inside.unlink(missing_ok=True)
                inside.symlink_to(os.readlink(link))
        self.path("/usr/local/bin/gpustasis").symlink_to(Path(sys.prefix) / "bin/gpustasis")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _links(path: Path) -> Sequence[Path]:
    """Every symbolic link on the way from path to the file that it means, path first."""
    found = []
    while path.is_symlink():
        found.append(path)
        path = Path(os.path.normpath(path.parent / os.readlink(path)))
    return found


def _python_paths() -> Sequence[Path]:
    """What the environment's Python consists of."""
    program = (Path(sys.prefix) / "bin/python").resolve()
    base = Path(sys.base_prefix)
    if base not in (Path("/usr"), Path("/")):
        return [Path(sys.prefix), base]
    return [Path(sys.prefix), program, Path(sysconfig.get_path("stdlib"))]
