# SPDX-License-Identifier: Apache-2.0
"""What `doctor --container` sees of processes, of these here: they are in no container."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis.diagnosis import Finding, Status, container_checks
from gpustasis.diagnosis.container import Container, Mount, find_container, unknown
from gpustasis.emulator import Emulator
from gpustasis.errors import CheckpointError
from support.job import Job

NONE = "libno-such.so.1"
PTRACE_SEIZE, PTRACE_DETACH = 0x4206, 17  # linux/ptrace.h


def check(*pids: int) -> dict[str, Finding]:
    container = Container(name="x", init=pids[0], tasks=pids, group="/", config=None)
    return {found.name: found for found in container_checks.check(container, NONE, NONE)}


def test_nothing_hinders(launch: Callable[..., Job]) -> None:
    job = launch([Path("/bin/sleep"), "1000"])
    found = check(job.pid)
    assert {finding.status for finding in found.values()} <= {Status.OK, Status.NOTE}
    assert "config.json was not found" in found["mounts"].text


@pytest.mark.parametrize(
    ("place", "text", "paused"),
    [
        ("freezer/c/freezer.state", "FREEZING", True),
        ("freezer/c/freezer.state", "FROZEN", True),
        ("freezer/c/freezer.state", "THAWED", False),
        ("c/cgroup.freeze", "1", True),
        ("c/cgroup.freeze", "0", False),
    ],
)
def test_a_paused_container(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launch: Callable[..., Job],
    place: str,
    text: str,
    paused: bool,
) -> None:
    """Also while its tasks still freeze: criu, at its end, waits for none of them."""
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text(f"{text}\n")
    monkeypatch.setattr(container_checks, "_GROUPS", tmp_path)
    pid = launch([Path("/bin/sleep"), "1000"]).pid
    container = Container(name="x", init=pid, tasks=(pid,), group="/c", config=None)
    found = {one.name: one for one in container_checks.check(container, NONE, NONE)}
    assert ("it is paused" in found["container"].text) == paused


MIB = 1 << 20
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
V2 = ("memory.max", "memory.current", "")


@pytest.mark.parametrize(("place", "names"), [("memory", V1), (".", V2)], ids=["v1", "v2"])
def test_room_in_a_pod(tmp_path: Path, place: str, names: tuple[str, str, str]) -> None:
    """Two levels: a container without a limit in a pod with one. Cached files count as free."""
    limit, usage, prefix = names
    unlimited = "max" if prefix == "" else str((1 << 63) - 4096)
    inner, outer = (64 * MIB, unlimited), (150 * MIB, 200 * MIB)
    for group, (used, most) in (("pods/one/job", inner), ("pods/one", outer)):
        directory = tmp_path / place / group
        directory.mkdir(parents=True, exist_ok=True)
        (directory / limit).write_text(f"{most}\n")
        (directory / usage).write_text(f"{used}\n")
        files = f"{prefix}inactive_file {20 * MIB}\n{prefix}active_file {10 * MIB}\n"
        (directory / "memory.stat").write_text(f"inactive_file 1\nshmem {MIB}\n{files}")
    free, where = container_checks.room("/pods/one/job", tmp_path)
    assert (free // MIB, where) == (80, f"by {limit} of control group /pods/one")


# argv: pids; prints name and text of each finding.
CHECKER = """
import json, sys
from gpustasis.diagnosis import container_checks
from gpustasis.diagnosis.container import Container
pids = tuple(map(int, sys.argv[1:]))
container = Container(name="x", init=pids[0], tasks=pids, group="/", config=None)
found = container_checks.check(container, "libcuda.so.1", "libnvidia-ml.so.1")
print(json.dumps([[finding.name, finding.status.value, finding.text] for finding in found]))
"""


@pytest.mark.parametrize("call", ["get_state", "init"])
def test_a_driver_that_does_not_answer_is_not_waited_for(
    emulator: Emulator,
    emulator_environ: dict[str, str],
    gpu_generations: Callable[..., Job],
    call: str,
) -> None:
    jobs = [gpu_generations(), gpu_generations()]
    emulator.add_fault(call, "hang")
    argv = [sys.executable, "-c", CHECKER, *(str(job.pid) for job in jobs)]
    begin = time.monotonic()
    ended = subprocess.run(
        argv, env=emulator_environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert time.monotonic() - begin < 50
    texts = [text for name, _, text in json.loads(ended.stdout) if name == "driver state"]
    if call == "init":  # which the states do not need
        assert texts == [f"process {job.pid}: running" for job in jobs]
        return
    assert f"process {jobs[0].pid}: GetState" in texts[0]
    assert "no answer within 10 s" in texts[0]
    assert texts[1] == f"process {jobs[1].pid}: not asked, for the driver does not answer"


def test_open_connections() -> None:
    code = (
        "import socket, sys;"
        "server = socket.create_server(('127.0.0.1', 0));"
        "ends = socket.create_connection(server.getsockname()), server.accept()[0];"
        "print('connected', flush=True); sys.stdin.readline();"
        "[end.close() for end in ends];"
        "print('closed', flush=True); sys.stdin.read()"
    )
    # A process of its own: this one may hold connections that earlier tests made.
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdin is not None and job.stdout is not None
        assert job.stdout.readline() == "connected\n"
        found = check(job.pid)["TCP connections"]
        assert found.status is Status.NOTE
        assert found.text.startswith("2 open")
        assert "tcp-established" in found.remedy
        job.stdin.write("\n")
        job.stdin.flush()
        assert job.stdout.readline() == "closed\n"
        assert "TCP connections" not in check(job.pid)
        job.stdin.close()


def test_a_debugger(launch: Callable[..., Job]) -> None:
    job = launch([Path("/bin/sleep"), "1000"])
    code = (
        "import ctypes, sys; libc = ctypes.CDLL(None, use_errno=True);"
        f"assert libc.ptrace({PTRACE_SEIZE}, {job.pid}, None, None) == 0;"
        "print('attached', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as debugger:
        assert debugger.stdout is not None and debugger.stdin is not None
        assert debugger.stdout.readline() == "attached\n"
        found = check(job.pid)["debugger"]
        assert found.status is Status.PROBLEM
        assert f"process {job.pid} is traced by process {debugger.pid}" in found.text
        debugger.stdin.close()
    assert "debugger" not in check(job.pid)


def test_a_perf_event_and_a_userfaultfd() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = ctypes.create_string_buffer(
        128
    )  # type 0 and 1 (software), size 128, config 9: dummy
    ctypes.c_uint32.from_buffer(attributes, 0).value = 1
    ctypes.c_uint32.from_buffer(attributes, 4).value = 128
    ctypes.c_uint64.from_buffer(attributes, 8).value = 9
    fd = libc.syscall(298, attributes, 0, -1, -1, 0)  # perf_event_open
    assert fd >= 0, os.strerror(ctypes.get_errno())
    try:
        assert "uses perf events" in check(os.getpid())["open files"].text
    finally:
        os.close(fd)
    fd = libc.syscall(323, os.O_CLOEXEC)  # userfaultfd
    assert fd >= 0, os.strerror(ctypes.get_errno())
    try:
        assert "uses a userfaultfd" in check(os.getpid())["open files"].text
    finally:
        os.close(fd)


CONFIG = {
    "mounts": [
        {"destination": "/proc", "type": "proc"},
        {"destination": "/data/", "type": "bind", "source": "/srv"},
        {"destination": "/sys/fs/cgroup", "type": "cgroup"},
        {"destination": "/var/run/secrets", "type": "bind"},
    ],
    "linux": {
        "maskedPaths": ["/proc/kcore"],
        "readonlyPaths": ["/proc/bus"],
        "devices": [{"path": "/dev/nvidia0"}],
    },
}


@pytest.mark.parametrize(
    ("mount", "known"),
    [
        (Mount("/", "/", "overlay", "overlay"), True),
        (Mount("/", "/proc", "proc", "proc"), True),
        (Mount("/srv", "/data", "ext4", "/dev/vda"), True),
        (Mount("/a", "/sys/fs/cgroup/cpu", "cgroup", "cgroup"), True),
        (Mount("/secrets", "/run/secrets", "tmpfs", "tmpfs"), True),
        (Mount("/null", "/proc/kcore", "devtmpfs", "udev"), True),
        (Mount("/bus", "/proc/bus", "proc", "proc"), True),
        (Mount("/nvidia0", "/dev/nvidia0", "devtmpfs", "udev"), True),
        (Mount("/", "/scratch", "tmpfs", "tmpfs"), True),  # CRIU makes it anew
        (Mount("/driver/nvidia/gpus/0", "/proc/driver/nvidia/gpus/0", "proc", "proc"), False),
        (Mount("/params", "/proc/driver/nvidia/params", "tmpfs", "tmpfs"), False),
        (Mount("/", "/mnt", "ext4", "/dev/vdb"), False),
        (Mount("/usr/lib/libcuda.so.1", "/usr/lib/libcuda.so.1", "ext4", "/dev/vda"), False),
    ],
    ids=lambda value: value.point if isinstance(value, Mount) else "",
)
def test_mounts_that_no_configuration_speaks_of(mount: Mount, known: bool) -> None:
    assert unknown([mount], CONFIG) == ([] if known else [mount])


@pytest.mark.parametrize("config", [{}, {"mounts": 7, "linux": []}, {"linux": {"maskedPaths": {}}}])
def test_a_configuration_that_is_odd(config: dict[str, object]) -> None:
    mount = Mount("/x", "/y", "ext4", "/dev/vda")
    assert unknown([mount], config) == [mount]


@pytest.mark.parametrize("name", ["--help", "", "ab", "../x", "x" * 300, "0123456789ab"])
def test_a_name_that_means_nothing(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"no container|no process is in"):
        find_container(name, {"PATH": ""})
