# SPDX-License-Identifier: Apache-2.0
"""The host without its containers: kernel, privileges, GPU driver, CRIU and our plugin."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from gpustasis import nvml, process
from gpustasis._core import is_userfaultfd_setting_left, openssl_version
from gpustasis.answering import ANSWER_S, answer_within
from gpustasis.criu import run
from gpustasis.criu.find import Criu, choose, find_all
from gpustasis.criu.plugin import PLUGIN_NAME, find_config, plugin_directory, read_config
from gpustasis.diagnosis import Finding, note, ok, problem
from gpustasis.driver import Device, Driver, list_devices_within
from gpustasis.dump_records import list_missing
from gpustasis.errors import CheckpointError, CriuError, DriverError, UnsupportedError
from gpustasis.text import mib

_CLONE3 = 435  # x86-64 and every other architecture
_CLONE_ARGS_SIZE = 80  # CLONE_ARGS_SIZE_VER1: with set_tid
_SET_TID_SIZE_OFFSET = 72
_TOO_MANY_LEVELS = 1000  # more pid namespaces than can be nested
_USERFAULTFD = 323  # x86-64
_USERFAULTFD_SETTING = Path("/proc/sys/vm/unprivileged_userfaultfd")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SOFT_DIRTY_BIT = 55  # of an entry of /proc/PID/pagemap

_CAPABILITIES = {  # linux/capability.h
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_RESOURCE": 24,
    "CAP_CHECKPOINT_RESTORE": 40,
}
_NO_ATTACH = 3  # ptrace_scope: nobody may, root neither
MINIMUM_DRIVER = "570"
_LINES_SHOWN = 3
_UPGRADE_DRIVER = f"upgrade NVIDIA's driver to {MINIMUM_DRIVER} or newer"
_UPGRADE_KERNEL = "use a kernel >= 5.5 and let no seccomp filter forbid it"


def check_kernel() -> list[Finding]:
    """What the kernel can do for us, each tried without side effects."""
    return [
        *(_memory_access(), _pidfd(), _set_tid(), _checkpoint_restore(), _soft_dirty()),
        *(io_uring(), freezer()),
    ]


def _memory_access() -> Finding:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    nothing = ctypes.c_ulong(0)
    if libc.process_vm_readv(os.getpid(), None, nothing, None, nothing, nothing) == 0:
        return ok("process_vm_readv", "available")
    text = os.strerror(ctypes.get_errno())
    return problem("process_vm_readv", text, "use a kernel with CONFIG_CROSS_MEMORY_ATTACH=y")


def _pidfd() -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as exc:
        return problem("pidfd_open", str(exc.strerror), _UPGRADE_KERNEL)
    return ok("pidfd_open", "available")


def _set_tid() -> Finding:
    """clone3 with more pids than there can be: a kernel that knows the field says EINVAL."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = ctypes.create_string_buffer(_CLONE_ARGS_SIZE)
    ctypes.c_uint64.from_buffer(arguments, _SET_TID_SIZE_OFFSET).value = _TOO_MANY_LEVELS
    libc.syscall(ctypes.c_long(_CLONE3), arguments, ctypes.c_size_t(_CLONE_ARGS_SIZE))
    error = ctypes.get_errno()
    if error == errno.EINVAL:
        return ok("clone3 with set_tid", "available")
    return problem("clone3 with set_tid", os.strerror(error), _UPGRADE_KERNEL)


def _checkpoint_restore() -> Finding:
    name = "CONFIG_CHECKPOINT_RESTORE"
    if Path("/proc/sys/kernel/ns_last_pid").exists():
        return ok(name, "set")
    return problem(name, "not set in this kernel", "use a distribution's kernel, or build with it")


def _soft_dirty() -> Finding:
    """A page just written is soft-dirty, where there is such a thing."""
    name = "CONFIG_MEM_SOFT_DIRTY"
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        page[0] = 1
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        try:
            with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
                pagemap.seek(address // mmap.PAGESIZE * 8)
                entry = int.from_bytes(pagemap.read(8), "little")
        except OSError as exc:
            return note(name, f"not known: cannot read /proc/self/pagemap: {exc.strerror}")
    if entry >> _SOFT_DIRTY_BIT & 1:
        return ok(name, "set")
    return note(name, "not set: CRIU's own incremental dumps (--track-mem) will not work")


def io_uring(proc: Path = Path("/proc")) -> Finding:
    """io_uring_disabled: 0: everybody may; 1: one group may; 2: nobody (sysctl/kernel.rst)."""
    name = "io_uring"
    try:
        value = int((proc / "sys/kernel/io_uring_disabled").read_text())
    except (OSError, ValueError):
        value = 0
    if value == 2:
        return ok(name, "switched off")
    return note(
        name,
        "programs may use it, and CRIU cannot dump one that does",
        "sysctl kernel.io_uring_disabled=2 (Linux 6.6), or a seccomp profile without "
        "io_uring_setup",
    )


def freezer(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> Finding:
    """Runtimes have CRIU stop a container through its control group."""
    name = "cgroup freezer"
    if (groups / "cgroup.controllers").exists():  # part of every cgroup v2 since Linux 5.2
        if any(groups.glob("*/cgroup.freeze")):
            return ok(name, "of cgroup v2")
        return note(name, "no control group has one that can be seen here")
    for line in (proc / "cgroups").read_text().splitlines():
        words = line.split()
        if words and words[0] == "freezer" and words[-1] == "1":
            return ok(name, "of cgroup v1")
    return problem(name, "not in this kernel", "use a kernel with CONFIG_CGROUP_FREEZER=y")


def check_privileges(proc: Path = Path("/proc")) -> list[Finding]:
    """What this process may do; criu run from here may do the same. proc: where the proc file
    system is mounted."""
    held = held_capabilities(proc)
    return [_capabilities(held), _yama(proc, held), _open_files(proc, held)]


def held_capabilities(proc: Path) -> frozenset[str]:
    """Those of _CAPABILITIES that are effective."""
    for line in (proc / "self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            mask = int(line.split()[1], 16)
            return frozenset(name for name, bit in _CAPABILITIES.items() if mask >> bit & 1)
    return frozenset()


def _capabilities(held: frozenset[str]) -> Finding:
    lacking = []
    if "CAP_SYS_PTRACE" not in held:
        lacking.append("CAP_SYS_PTRACE")
    if not held & {"CAP_SYS_ADMIN", "CAP_CHECKPOINT_RESTORE"}:
        lacking.append("CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE")
    if lacking:
        return problem("capabilities", f"lacking {', '.join(lacking)}", "run as root")
    return ok("capabilities", ", ".join(sorted(held)))


def _yama(proc: Path, held: frozenset[str]) -> Finding:
    path = proc / "sys/kernel/yama/ptrace_scope"
    try:
        scope = int(path.read_text())
    except FileNotFoundError:
        return ok("yama", "not in this kernel")
    if scope >= _NO_ATTACH:
        remedy = "boot with another kernel.yama.ptrace_scope: this one cannot be lowered"
        return problem("yama", f"ptrace_scope is {scope}: nothing can be traced", remedy)
    if scope > 0 and "CAP_SYS_PTRACE" not in held:
        text = f"ptrace_scope is {scope}: only with CAP_SYS_PTRACE"
        return problem("yama", text, "run as root, or: sysctl kernel.yama.ptrace_scope=0")
    return ok("yama", f"ptrace_scope is {scope}")


def _open_files(proc: Path, held: frozenset[str]) -> Finding:
    """CRIU raises its limit of open files to fs.nr_open, and logs an error where it may not."""
    name = "limit of open files"
    largest = int((proc / "sys/fs/nr_open").read_text())
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if "CAP_SYS_RESOURCE" in held or hard == resource.RLIM_INFINITY or hard >= largest:
        return ok(name, f"hard limit {hard}, fs.nr_open {largest}")
    text = f"fs.nr_open is {largest}, the hard limit {hard}, and CAP_SYS_RESOURCE is lacking"
    return problem(name, text, f"sysctl fs.nr_open={hard}, or raise the hard limit")


def find_driver_version(nvml_library: str) -> str | DriverError:
    """The driver's version, or why NVML does not tell it. NVML is loaded into this process."""
    try:
        return answer_within(ANSWER_S, "NVML", partial(nvml.driver_version, nvml_library))
    except DriverError as exc:
        return exc


def check_gpus(driver_library: str, version: str | DriverError) -> list[Finding]:
    """Look at the driver, which is loaded into this process. version: of find_driver_version."""
    return [*_driver(driver_library), _nvml(version)]


def _driver(library: str) -> list[Finding]:
    name = "CUDA driver"
    try:
        driver = Driver(library)
    except DriverError as exc:
        remedy = (
            f"install NVIDIA's driver {MINIMUM_DRIVER} or newer; "
            "for a trial without a GPU: gpustasis emulator run -- PROGRAM"
        )
        return [problem(name, str(exc), remedy)]
    try:
        version = answer_within(ANSWER_S, "cuDriverGetVersion", driver.version)
        text = f"{library} supports CUDA {version // 1000}.{version % 1000 // 10}"
        if not driver.has_checkpoint_api():
            return [problem(name, f"{text}, without the checkpoint calls", _UPGRADE_DRIVER)]
        devices = list_devices_within(driver)
    except DriverError as exc:
        return [problem(name, str(exc), "see what nvidia-smi and the kernel's log say")]
    emulated = any(device.emulated for device in devices)
    if emulated:
        text += "; it is the emulator: nothing here runs on a real GPU"
    driver_finding = note(name, text) if emulated else ok(name, text)
    if not devices:
        return [driver_finding, problem("GPU", "the driver lists none", "see what nvidia-smi says")]
    found = [driver_finding, *(_device(number, item) for number, item in enumerate(devices))]
    return found if emulated else [*found, staging_pages()]


def staging_pages(system: Path = _HUGE_PAGES) -> Finding:
    """Whether the driver gets huge pages for its staging: it asks for none (docs/hardware.md)."""
    name = "transparent huge pages"
    try:
        chosen = system.read_text().partition("[")[2].partition("]")[0]
    except OSError as exc:
        return note(name, f"not known: cannot read {system}: {exc.strerror}")
    if chosen == "always":
        return ok(name, chosen)
    return note(
        name,
        f"{chosen}: the driver stages GPU memory in small pages, which on an H100 took 1.5 to 2 "
        "times as long as in huge ones",
        f"echo always > {system}; it counts for all programs of the host",
    )


def _device(number: int, device: Device) -> Finding:
    return ok(f"GPU {number}", f"{device.name}, {mib(device.memory_size)}, {device.uuid}")


def _nvml(version: str | DriverError) -> Finding:
    if isinstance(version, DriverError):
        remedy = "checkpoints will not say which driver they come from; it comes with the driver"
        return note("NVML", str(version), remedy)
    return ok("NVML", f"driver {version}")


def check_criu(environ: Mapping[str, str], explicit: str | None) -> list[Finding]:
    """CRIU, and our plugin as it would load it. explicit: as for find_all."""
    candidates = find_all(environ, explicit)
    try:
        chosen = choose(candidates)
    except CriuError as exc:
        install = "install criu >= 4.1, or name one with --criu or GPUSTASIS_CRIU"
        return [problem("CRIU", str(exc), install), _configuration(environ)]
    findings = [ok("CRIU", f"{chosen.version_text}, {chosen.program} ({chosen.origin})")]
    findings += [_passed_over(other) for other in candidates if not other.usable]
    return [
        *findings,
        _self_check(chosen, environ),
        _plugin(chosen, environ),
        _configuration(environ),
    ]


def _passed_over(criu: Criu) -> Finding:
    reason = criu.problem or f"version {criu.version_text} is too old"
    return note("CRIU", f"{criu.program} is not used: {reason}")


def _self_check(criu: Criu, environ: Mapping[str, str]) -> Finding:
    name = "criu check"
    try:
        ended = run.check(criu, environ)
    except OSError as exc:
        return problem(name, str(exc), "see whether criu runs at all")
    if ended.status == 0:
        return ok(name, "Looks good.")
    lines = [line for line in ended.output.splitlines() if "Error" in line]
    text = "; ".join(lines[:_LINES_SHOWN]) or ended.ending
    return problem(name, text, "run as root; else the kernel lacks what is named here")


def _plugin(criu: Criu, environ: Mapping[str, str]) -> Finding:
    name = "plugin"
    try:
        directory = plugin_directory(environ)
    except UnsupportedError as exc:
        return problem(name, str(exc), "install gpustasis anew")
    plugin = directory / PLUGIN_NAME
    others = sorted(item.name for item in directory.glob("*.so") if item != plugin)
    if others:
        text = f"{directory} holds {', '.join(others)} as well, which criu would load too"
        return problem(name, text, "keep the plugin in a directory of its own")
    ended = process.run([*criu.loader(environ), "--list", str(plugin)], timeout_s=60)
    lacking = [line.strip() for line in ended.output.splitlines() if "not found" in line]
    if ended.status != 0 or lacking:
        text = "; ".join(lacking) or ended.output.strip() or ended.ending
        return problem(name, f"{plugin} does not load: {text}", "install what is not found")
    return ok(name, str(plugin))


def _configuration(environ: Mapping[str, str]) -> Finding:
    name = "configuration"
    path = find_config(environ)
    if path is None:
        return ok(name, "defaults; there is no file")
    try:
        read_config(path)
    except CheckpointError as exc:
        return problem(name, str(exc), "mend the file; docs/operating.md explains every key")
    return ok(name, str(path))


def check_sealing() -> list[Finding]:
    """The OpenSSL that is linked in: that of the machine is not used."""
    return [ok("sealing", f"{openssl_version()}, linked in")]


def check_dropped_memory(setting: Path = _USERFAULTFD_SETTING) -> list[Finding]:
    """Processes whose memory a dump has taken out and not put back, and what keeps that memory from
    reading as zeros when criu is killed. A dump that is under way has such processes as well."""
    try:
        found = [
            problem(
                f"memory of process {record.pid}",
                f"a dump into {record.directory} has taken it out and not put it back",
                f"gpustasis recover {record.pid}",
            )
            for record in list_missing()
        ]
        left = is_userfaultfd_setting_left()
    except (OSError, ValueError) as exc:
        return [problem("dropped memory", str(exc), "look who has made that file, and remove it")]
    return [_guard(setting, left=left), *found]


def _guard(setting: Path, *, left: bool) -> Finding:
    name = "guard of dropped memory"
    if left:
        return problem(
            name,
            "a dump was killed while vm.unprivileged_userfaultfd was 1",
            "sysctl vm.unprivileged_userfaultfd=0",
        )
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(ctypes.c_long(_USERFAULTFD), ctypes.c_long(os.O_CLOEXEC))
    if fd < 0:
        text = f"none: userfaultfd: {os.strerror(ctypes.get_errno())}"
        return note(name, f"{text}; GPU memory that is out reads as zeros if criu is killed")
    os.close(fd)
    if not os.access(setting, os.W_OK):
        return note(name, f"{setting} cannot be written: none for jobs without CAP_SYS_PTRACE")
    return ok(name, "userfaultfd is available")
