# SPDX-License-Identifier: Apache-2.0
"""What the driver leaves in a process, as /proc shows it, before and after a checkpoint."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis.emulator import Emulator
from support.job import Job

Call = Callable[..., tuple[int, int]]
PROGRAMS = Path(__file__).resolve().parent / "programs"

# An arena of malloc's, and a stack with its guard: what threads of a C library leave behind.
HELPERS_LEAVE = (64 << 20) + (8 << 20) + 4096


def descriptors(pid: int) -> dict[int, str]:
    """Descriptor -> what it is, without inode numbers; those that we inherited ourselves left
    out."""
    folder = Path(f"/proc/{pid}/fd")
    return {
        int(fd.name): re.sub(r":\[\d+\]", "", os.readlink(fd))
        for fd in folder.iterdir()
        if int(fd.name) <= 2 or not _is_inherited(int(fd.name))
    }


def _is_inherited(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


def mappings(pid: int) -> dict[tuple[int, int], str]:
    """(start, end) -> "rw-p name"."""
    found = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, protection, _, _, _, *name = line.split(maxsplit=5)
        start, end = (int(number, 16) for number in span.split("-"))
        found[start, end] = " ".join([protection, *(word.strip() for word in name)])
    return found


def resident(pid: int, start: int) -> int:
    """Bytes of the mapping at `start` that are in memory."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    match = re.search(rf"^{start:08x}-.*?^Rss:\s+(\d+) kB", text, re.MULTILINE | re.DOTALL)
    assert match is not None
    return int(match[1]) * 1024


def closes_on_exec(pid: int, fd: int) -> bool:
    info = Path(f"/proc/{pid}/fdinfo/{fd}").read_text()
    return bool(int(re.findall(r"flags:\s*(\d+)", info)[0], 8) & os.O_CLOEXEC)


def listening(pid: int) -> list[str]:
    namespace = os.stat(f"/proc/{pid}/ns/pid").st_ino
    name = f"@cuda-uvmfd-{namespace}-{pid}"
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line for line in lines if line.split()[-1].rstrip("@") == name]


def stand_in(emulator: Emulator, pid: int, what: str) -> str:
    """What plays "device" or "mapping" in a process on this machine."""
    processes = emulator.status()["gpus"][0]["processes"]
    found = [process[f"{what}_stand_in"] for process in processes if process["pid"] == pid]
    assert len(found) == 1
    return str(found[0])


def event_thread(pid: int) -> Path:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return next(task for task in tasks if (task / "comm").read_text() == "cuda-EvtHandlr\n")


def checkpoint(caller: Call, pid: int) -> None:
    assert caller("lock", pid)[0] == 0
    assert caller("checkpoint", pid)[0] == 0


def test_descriptors_of_a_running_process(vectors: Callable[..., Job], emulator: Emulator) -> None:
    job = vectors()
    found = descriptors(job.pid)
    kinds = Counter(found.values())
    assert kinds["anon_inode:[eventfd]"] == 3
    assert kinds["pipe"] == 6
    assert kinds[stand_in(emulator, job.pid, "device")] >= 23
    assert all(closes_on_exec(job.pid, fd) for fd in found if fd > 2)
    assert len(listening(job.pid)) == 1
    fields = listening(job.pid)[0].split()
    assert fields[4] == "0005"  # SOCK_SEQPACKET
    assert int(fields[3], 16) & 0x10000  # listening


def test_a_checkpointed_process_has_no_device_and_keeps_its_channel(
    vectors: Callable[..., Job], caller: Call
) -> None:
    job = vectors()
    before = descriptors(job.pid)
    checkpoint(caller, job.pid)
    after = descriptors(job.pid)
    log = job.log.as_posix()
    assert Counter(after.values()) == Counter(
        {"/dev/null": 1, log: 2, "anon_inode:[eventfd]": 3 + 10 + 1, "pipe": 6, "socket": 1}
    )
    changed = dict(after.items() - before.items())  # the others have the same numbers
    assert set(changed.values()) == {"anon_inode:[eventfd]"}
    assert sum(fd in before and not closes_on_exec(job.pid, fd) for fd in changed) == 10
    assert sum(fd not in before and closes_on_exec(job.pid, fd) for fd in changed) == 1
    assert len(listening(job.pid)) == 1
    names = " ".join(mappings(job.pid).values())
    assert "io_uring" not in names
    assert "gpustasis-emulated" not in names


def test_a_restored_process_has_its_devices_and_passes_eight_on(
    vectors: Callable[..., Job], caller: Call, emulator: Emulator
) -> None:
    """Two of cuInit's GPU files do not come back, and an eventfd is there for good."""
    job = vectors()
    before = descriptors(job.pid)
    device = stand_in(emulator, job.pid, "device")
    later = Counter({"anon_inode:[eventfd]": 1})
    for _ in range(2):
        checkpoint(caller, job.pid)
        held = {fd for fd in descriptors(job.pid) if not closes_on_exec(job.pid, fd) and fd > 2}
        assert caller("restore", job.pid, "init")[0] == 0
        restored = descriptors(job.pid)
        assert Counter(restored.values()) == Counter(before.values()) + later - Counter({device: 2})
        assert {restored[fd] for fd in held} == {device}
        passed_on = {fd for fd in restored if not closes_on_exec(job.pid, fd) and fd > 2}
        assert len(held) == 10
        assert len(passed_on) == 8
        assert passed_on < held
        assert caller("unlock", job.pid)[0] == 0


def test_device_mappings_come_back_where_they_were(
    vectors: Callable[..., Job], caller: Call
) -> None:
    def devices() -> dict[tuple[int, int], str]:
        marks = ("io_uring", "perf_event", "nvidia-uvm")
        found = mappings(job.pid).items()
        return {span: name for span, name in found if any(mark in name for mark in marks)}

    job = vectors()
    before = devices()
    assert len(before) == 2
    for _ in range(3):
        checkpoint(caller, job.pid)
        assert not devices()
        held = [span for span, name in mappings(job.pid).items() if name == "---p"]
        for start, end in before:
            assert any(first <= start and end <= last for first, last in held)
        assert caller("restore", job.pid, "init")[0] == 0
        assert caller("unlock", job.pid)[0] == 0
        assert devices() == before


def test_the_event_thread_waits_from_lock_to_unlock(
    vectors: Callable[..., Job], caller: Call
) -> None:
    job = vectors()
    thread = event_thread(job.pid)

    def waits_in(word: str) -> None:
        deadline = time.monotonic() + 30
        while word not in (thread / "wchan").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    waits_in("poll")
    assert caller("lock", job.pid)[0] == 0
    waits_in("futex")
    assert caller("unlock", job.pid)[0] == 0
    waits_in("poll")


def test_reservations_and_device_mapping(vectors: Callable[..., Job], emulator: Emulator) -> None:
    job = vectors()
    found = mappings(job.pid)
    assert found[0x200000000, 0x400200000].startswith("---p")
    kind = stand_in(emulator, job.pid, "mapping")
    assert [span[1] - span[0] for span, name in found.items() if f"[{kind}]" in name] in (
        [64 * 1024],  # io_uring
        [os.sysconf("SC_PAGESIZE")],  # perf_event
    )


def test_device_memory_is_not_in_the_process(vectors: Callable[..., Job]) -> None:
    job = vectors(50)
    address = int(job.output().split(" at ")[1].split()[0], 16)
    window = next(
        (span, name) for span, name in mappings(job.pid).items() if span[0] <= address < span[1]
    )
    assert window[1].startswith("---p")
    assert window[0][1] - window[0][0] >= 256 << 20


@pytest.mark.parametrize("left", [0, HELPERS_LEAVE])
def test_staging_is_fresh_private_memory_of_the_size_of_vram(
    vectors: Callable[..., Job], caller: Call, emulator: Emulator, left: int
) -> None:
    emulator.set("leftovers", str(int(left > 0)))
    job = vectors(20)
    before = mappings(job.pid)
    checkpoint(caller, job.pid)
    after = mappings(job.pid)
    fresh = {span: name for span, name in after.items() if span not in before}
    size = sum(end - start for start, end in fresh)
    grown = sum(end - start for start, end in before if (start, end) not in after)
    released = sum(
        end - start
        for (start, end), name in before.items()
        if (start, end) not in after and "gpustasis-emulated" in name
    )
    assert size - (grown - released) == (40 << 20) + left
    assert set(fresh.values()) <= {"rw-p", "---p"}
    assert sum(resident(job.pid, start) for start, _ in fresh) >= 40 << 20
    assert caller("restore", job.pid, "init")[0] == 0
    assert caller("unlock", job.pid)[0] == 0
    restored = mappings(job.pid)
    assert sum(end - start for start, end in restored) == left + sum(
        end - start for start, end in before
    )


def test_untouched_memory_is_staged_as_zeros_and_touched(
    launch_cuda: Callable[..., Job], compile_cuda: Callable[..., Path], caller: Call
) -> None:
    program = compile_cuda(PROGRAMS.parent.parent / "programs" / "gpu_generations.c")
    job = launch_cuda([program, "2", "1", "32"])
    job.wait_for("ready")
    before = mappings(job.pid)
    checkpoint(caller, job.pid)
    fresh = [span for span in mappings(job.pid) if span not in before]
    assert sum(resident(job.pid, start) for start, _ in fresh) >= 34 << 20


def test_no_helper_thread_is_left(vectors: Callable[..., Job], caller: Call) -> None:
    job = vectors(30)
    before = sorted(os.listdir(f"/proc/{job.pid}/task"))
    checkpoint(caller, job.pid)
    assert sorted(os.listdir(f"/proc/{job.pid}/task")) == before


def test_the_gpu_lists_the_process_while_it_holds_memory(
    vectors: Callable[..., Job], caller: Call, emulator: Emulator
) -> None:
    job = vectors(10)

    def listed() -> list[dict[str, object]]:
        gpus = emulator.status()["gpus"]
        return [process for process in gpus[0]["processes"] if process["pid"] == job.pid]

    assert [process["used_bytes"] for process in listed()] == [20 << 20]
    checkpoint(caller, job.pid)
    assert listed() == []
    assert emulator.status()["gpus"][0]["used_bytes"] == 0


def test_pinned_memory_is_shared_zero_pages(
    launch_cuda: Callable[..., Job], compile_cuda: Callable[..., Path], kernels: Path, caller: Call
) -> None:
    job = launch_cuda([compile_cuda(PROGRAMS / "kernel_rounds.c"), kernels])
    job.wait_for("round 1 ok")
    shared = [span for span, name in mappings(job.pid).items() if name.startswith("rw-s /dev/zero")]
    # What it asked for, and what the driver keeps for itself.
    assert sorted(end - start for start, end in shared) == [2 << 20, 4 << 20]
    checkpoint(caller, job.pid)
    assert all(mappings(job.pid)[span].startswith("rw-s /dev/zero") for span in shared)


def test_socket_name_that_is_taken_fails_cuda(
    compile_cuda: Callable[..., Path], emulator_environ: dict[str, str]
) -> None:
    program = compile_cuda(PROGRAMS / "plain_vectors.c")
    # The shell's pid is the program's, so its name can be taken before that exists.
    script = (
        "import os, socket, sys\n"
        "name = f'\\0cuda-uvmfd-{os.stat(\"/proc/self/ns/pid\").st_ino}-{os.getpid()}\\0'\n"
        "taken = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "taken.bind(name)\n"
        "os.set_inheritable(taken.fileno(), True)\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    ended = subprocess.run(
        ["python3", "-c", script, str(program), "1", "1", "1"],
        env=emulator_environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "cuInit(0): 304 (OS call failed" in ended.stderr


@pytest.mark.parametrize(("cloexec", "wanted"), [("1", True), ("0", False)])
def test_close_on_exec_is_a_setting(
    vectors: Callable[..., Job], caller: Call, emulator: Emulator, cloexec: str, wanted: bool
) -> None:
    emulator.set("cloexec", cloexec)
    job = vectors()
    _, tid = caller("tid", job.pid)
    value = int(Path(f"/proc/{job.pid}/task/{tid}/comm").read_text()[4:], 16)
    assert closes_on_exec(job.pid, value >> 22) is wanted
