# SPDX-License-Identifier: Apache-2.0
"""What is found of NCCL in a process.

There is neither NCCL nor a GPU here. The processes are stand-ins: they map an empty file that is
named as NCCL's library is, name their threads as PyTorch does, and are started with its settings.
What NCCL itself does with them is not tested.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpustasis import nccl
from gpustasis.emulator import Emulator
from gpustasis.nccl import Seen
from python.test_container_checks import CHECKER
from support.job import Job

CALM = {
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
}
NEWER, DRIVER_580 = 13020, 13000
# argv: files to map, files to open, names of threads, as JSON.
STAND_IN = """
import ctypes, json, mmap, sys, threading
maps, files, names = json.loads(sys.argv[1])
kept = [open(path, "rb") for path in (*maps, *files)]
mapped = [mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) for file in kept[:len(maps)]]
libc = ctypes.CDLL(None)
named, over = threading.Barrier(len(names) + 1), threading.Event()
def name_it(name):
    libc.prctl(15, name.encode())
    named.wait()
    over.wait()
for name in names:
    threading.Thread(target=name_it, args=(name,), daemon=True).start()
named.wait()
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def stand_in(
    *,
    maps: Sequence[Path] = (),
    opens: Sequence[str] = (),
    threads: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
) -> Iterator[int]:
    asked = json.dumps([list(map(str, maps)), list(opens), list(threads)])
    argv = [*before, sys.executable, "-c", STAND_IN, asked]
    with subprocess.Popen(
        argv,
        env={"PATH": os.environ["PATH"], **(environ or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.stdin.close()


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "libnccl.so.2"
    path.write_bytes(bytes(4096))
    return path


def names(seen: Seen, *, version: int | None = DRIVER_580, **how: bool) -> dict[str, bool]:
    """Of each finding whether it is known to break a checkpoint."""
    use = {"shares_host": False, "stands": False} | how
    found = list(nccl.findings(seen, version, **use))
    return {one.name: one.breaks for one in reversed(found)}  # the first one of a name stays


def test_a_process_without_nccl_has_no_findings() -> None:
    with stand_in(environ={"NCCL_NVLS_ENABLE": "1"}) as pid:
        seen = nccl.look(pid)
    assert not seen.has_anything
    assert names(seen) == {}
    assert names(nccl.look(pid)) == {}  # it has ended


def test_a_library_that_is_mapped(library: Path) -> None:
    with stand_in(maps=[library]) as pid:
        seen = nccl.look(pid)
    assert names(seen, shares_host=True) == {
        nccl.NVLS: True,
        nccl.RAS: True,
        nccl.P2P: True,
        nccl.CUMEM: True,
    }
    with stand_in(maps=[library], environ=CALM) as pid:
        assert names(nccl.look(pid), shares_host=True) == {}
    library.rename(library.with_name("libnccl-like.so.2"))
    with stand_in(maps=[library.with_name("libnccl-like.so.2")]) as pid:
        assert names(nccl.look(pid)) == {}


def test_threads_of_a_process_group() -> None:
    with stand_in(threads=["pt_nccl_watchdg", "pt_nccl_heartbt"], environ=CALM) as pid:
        seen = nccl.look(pid)
    assert names(seen, version=DRIVER_580) == {}
    assert names(seen, version=NEWER) == {nccl.THREADS: True}
    assert names(seen, version=None) == {nccl.THREADS: True}
    found = next(nccl.findings(seen, NEWER, shares_host=False, stands=True))
    assert f"process {pid} is a member of an NCCL process group" in found.text
    with stand_in(threads=["NCCL Service  0"], environ=CALM) as pid:
        assert nccl.look(pid).has_nccl


def test_a_program_that_nccl_is_linked_into(tmp_path: Path, compile_c: Callable[..., Path]) -> None:
    source = tmp_path / "linked.c"
    source.write_text(
        "#include <stdio.h>\nint ncclCommInitRank(void) { return 0; }\n"
        'int main(void) { puts("ready"); fflush(stdout); return getchar() + ncclCommInitRank(); }\n'
    )
    program = compile_c(source)
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        seen = nccl.look(process.pid)
        process.stdin.close()
    assert seen.has_nccl
    assert not seen.threads


@pytest.mark.parametrize(
    ("changed", "how", "found"),
    [
        ({"NCCL_NVLS_ENABLE": "2"}, {}, {nccl.NVLS: True}),
        ({"NCCL_RAS_ENABLE": "1"}, {}, {nccl.RAS: True}),
        ({"NCCL_P2P_DISABLE": "0"}, {}, {nccl.P2P: False}),
        ({"NCCL_P2P_DISABLE": "0", "NCCL_P2P_LEVEL": "LOC"}, {}, {}),
        ({"NCCL_P2P_DISABLE": "0"}, {"shares_host": True}, {nccl.P2P: True}),
        ({"NCCL_P2P_DISABLE": "0", "LOCAL_WORLD_SIZE": "2"}, {}, {nccl.P2P: True}),
        ({"NCCL_P2P_DISABLE": "0", "LOCAL_WORLD_SIZE": "1"}, {}, {nccl.P2P: False}),
        ({"NCCL_P2P_DISABLE": "0"}, {"shares_host": True, "stands": True}, {nccl.P2P: False}),
        ({"NCCL_CUMEM_ENABLE": "1"}, {"shares_host": True}, {nccl.CUMEM: False}),
        (
            {"NCCL_CUMEM_ENABLE": "1", "NCCL_P2P_DISABLE": ""},
            {"shares_host": True},
            {nccl.P2P: True, nccl.CUMEM: True},
        ),
        ({"NCCL_CUMEM_HOST_ENABLE": ""}, {"shares_host": True}, {nccl.CUMEM: False}),
    ],
)
def test_settings(
    changed: dict[str, str], how: dict[str, bool], found: dict[str, bool], library: Path
) -> None:
    with stand_in(maps=[library], environ=CALM | changed) as pid:
        seen = nccl.look(pid)
    assert names(seen, **how) == found


def test_what_a_process_says_of_itself_is_only_quoted(library: Path) -> None:
    value = "\x1b[2J\n" + "x" * 5000
    with stand_in(maps=[library], environ=CALM | {"NCCL_NVLS_ENABLE": value}) as pid:
        (found,) = nccl.findings(nccl.look(pid), DRIVER_580, shares_host=True, stands=False)
    assert found.text.isprintable()
    assert r"NCCL_NVLS_ENABLE is '\x1b[2J\nxxx" in found.text
    assert len(found.text) < 300
    assert found.remedy == "start it with NCCL_NVLS_ENABLE=0"


def test_an_environment_that_cannot_be_read() -> None:
    (found,) = (
        one
        for one in nccl.findings(
            Seen(pid=1, has_nccl=True), DRIVER_580, shares_host=False, stands=False
        )
        if one.name == nccl.NVLS
    )
    assert "NCCL_NVLS_ENABLE is not known" in found.text


IN_OWN_DEV = (
    "mount -t tmpfs none /dev && mkdir /dev/infiniband && "
    'touch /dev/gdrdrv /dev/infiniband/uverbs0 /dev/null && exec "$@"'
)


def test_device_files_that_are_open(tmp_path: Path) -> None:
    """Plain files of their names, on a /dev of its own."""
    before = ("unshare", "--mount", "sh", "-c", IN_OWN_DEV, "sh")
    devices = ("/dev/gdrdrv", "/dev/infiniband/uverbs0")
    with stand_in(opens=devices, before=before, environ=CALM) as pid:
        seen = nccl.look(pid)
    assert seen.devices == set(devices)
    assert names(seen) == {nccl.GDRCOPY: True, nccl.RDMA: True}
    fabric = tmp_path / "libfabric.so.1"
    fabric.write_bytes(bytes(4096))
    with stand_in(maps=[fabric]) as pid:
        assert names(nccl.look(pid)) == {nccl.GDRCOPY: False}
    with stand_in(maps=[fabric], environ={"FI_HMEM_CUDA_USE_GDRCOPY": "0"}) as pid:
        assert names(nccl.look(pid)) == {}


def test_doctor_tells_of_a_container(
    emulator: Emulator, emulator_environ: dict[str, str], gpu_generations: Callable[..., Job]
) -> None:
    """Of processes with NCCL's threads, which the emulator starts."""
    emulator.set("nccl", "1")
    job = gpu_generations()
    argv = [sys.executable, "-c", CHECKER, str(job.pid)]
    done = subprocess.run(argv, env=emulator_environ, capture_output=True, text=True, check=True)
    found = [(status, text) for name, status, text in json.loads(done.stdout) if name == "NCCL"]
    assert ("problem", True) in [(status, "(nccl-nvls)" in text) for status, text in found]
    assert ("note", True) in [(status, "(nccl-p2p)" in text) for status, text in found]
    assert not any("(nccl)" in text for _, text in found)  # driver 580
