# SPDX-License-Identifier: Apache-2.0
"""Whether this host can restore a checkpoint, as far as that can be said without trying.

Memory itself is not checked: `gpustasis verify` does that.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any

from gpustasis import nvml
from gpustasis._core import Manifest
from gpustasis.answering import ANSWER_S, answer_within
from gpustasis.archive.layout import SPEC
from gpustasis.archive.opened import Archive, inspect_archive
from gpustasis.archive.opened import open_files as open_checkpoint
from gpustasis.criu.find import choose, find_all
from gpustasis.criu.images import core_name, parse_machine
from gpustasis.diagnosis import (
    Finding,
    Status,
    cpu_memory,
    host,
    kubernetes,
    mapped_files,
    note,
    ok,
    open_files,
    problem,
)
from gpustasis.driver import Device, Driver, list_devices_within
from gpustasis.errors import CheckpointError, CriuError, DriverError, SealError
from gpustasis.image.checkpoint import STORE_ROOT, CheckpointFiles, State, find_checkpoint
from gpustasis.image.inspection import Inspection, inspect_files
from gpustasis.text import mib, plural

_OTHER_GPUS = 13000  # CUDA version of the first driver (R580) that restores on other GPUs
# What engines make anew for each container, and mount from there.
_MADE_ANEW = (
    *("/run/", "/var/run/", "/var/lib/kubelet/"),
    *("/var/lib/containers/", "/var/lib/containerd/", "/var/lib/crio/"),
)
_SHIM = r"^io\.containerd\.(\w+)\.(v\d+)$"  # how containerd names a runtime, after its program
_MACHINES = {"x86_64": "X86_64", "aarch64": "AARCH64"}


def _remedy(exc: CheckpointError) -> str:
    if isinstance(exc, SealError):
        return "open it with gpustasis unseal, and look at what that writes"
    is_there = not isinstance(exc.__cause__, FileNotFoundError)
    return "make a new one; gpustasis verify looks at every byte" if is_there else "name another"


def check(
    checkpoint: Path,
    environ: Mapping[str, str],
    criu_program: str | None,
    driver_library: str,
    nvml_library: str,
    rootfs: Path | None = None,
) -> list[Finding]:
    """checkpoint: an archive or a directory. criu_program: as for find_all. rootfs: a copy of the
    container's root file system; None: there is none at hand."""
    try:
        with open_checkpoint(checkpoint) as files:
            seen = _look(files)
    except CheckpointError as exc:
        return [problem("checkpoint", str(exc), _remedy(exc))]
    return _findings(seen, environ, criu_program, (driver_library, nvml_library), rootfs)


def check_files(
    files: CheckpointFiles,
    environ: Mapping[str, str],
    criu_program: str | None,
    driver_library: str,
    nvml_library: str,
) -> list[Finding]:
    """The same of a checkpoint that is open. Raises CheckpointError if it cannot be read."""
    return _findings(_look(files), environ, criu_program, (driver_library, nvml_library), None)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What was read of a checkpoint. opened: findings on the files that it has open."""

    found: Inspection
    machine: str
    spec: bytes | None
    manifest: Manifest | None
    opened: list[Finding]


def _look(files: CheckpointFiles) -> _Seen:
    manifest = files.manifest()
    if isinstance(files, Archive):
        found = inspect_archive(files)
        return _Seen(found, _machine(files, found), files.small(SPEC), manifest, [])
    found = inspect_files(files)
    opened = list(_open_files(files, manifest))
    return _Seen(found, _machine(files, found), None, manifest, opened)


def _findings(
    seen: _Seen,
    environ: Mapping[str, str],
    criu_program: str | None,
    libraries: tuple[str, str],
    rootfs: Path | None,
) -> list[Finding]:
    found, spec, manifest = seen.found, seen.spec, seen.manifest
    count = len(found.processes)
    text = f"{found.directory}: {plural(count, 'process', 'es')}, {len(found.needed_gpus())} GPU(s)"
    return [
        ok("checkpoint", text),
        *_architecture(seen.machine),
        *[f for f in host.check_kernel() if f.status is Status.PROBLEM],
        *_criu(found, environ, criu_program),
        *_runtime(found, environ),
        *_parent(found, found.archive is not None),
        *_gpus(found, *libraries),
        *_cpu_memory(found),
        *_host_memory(found),
        *_mounts(spec),
        *([] if manifest is None else _mapped_files(manifest, found, spec, rootfs)),
        *seen.opened,
    ]


def _open_files(files: CheckpointFiles, manifest: Manifest | None) -> Iterator[Finding]:
    recorded = None if manifest is None else manifest.requirements
    mapped = () if recorded is None else recorded.files
    return open_files.check(files, manifest, {file.path for file in mapped})


def _mapped_files(
    manifest: Manifest, found: Inspection, spec: bytes | None, rootfs: Path | None
) -> Iterator[Finding]:
    try:
        mounts = {
            place: None if source is not None and source.startswith(_MADE_ANEW) else source
            for place, source in mapped_files.mounts_of(spec).items()
        }
    except ValueError:  # the finding on mounts says it
        return
    changes = found.archive is not None and found.archive.rootfs_diff_bytes > 0
    yield from mapped_files.check(manifest.requirements, mounts, rootfs, has_changes=changes)


def _machine(files: Any, found: Inspection) -> str:
    """As CRIU names it; empty if there is no core image."""
    for process in found.processes:
        name = core_name(process.pid)
        raw = files.read(name)
        if raw is not None:
            return parse_machine(raw, files.place(name))
    return ""


def _architecture(machine: str) -> Iterator[Finding]:
    name = "architecture"
    here = _MACHINES.get(platform.machine(), platform.machine())
    if machine == here:
        yield ok(name, machine)
    elif machine:
        yield problem(name, f"it is of {machine}, this host is {here}", "restore it on its like")


def _criu(found: Inspection, environ: Mapping[str, str], explicit: str | None) -> Iterator[Finding]:
    try:
        chosen = choose(find_all(environ, explicit))
    except CriuError as exc:
        yield problem("CRIU", str(exc), "install criu >= 4.1")
        return
    # Processes that lack memory are not to outlive criu: the plugin sees to that in its ptrace().
    why = cpu_memory.why_not_led(chosen.program, "ptrace") if _plain_bytes(found) else ""
    if why:
        yield problem("CRIU", f"{why}, so the plugin refuses the restore", "take another criu")
    else:
        yield ok("CRIU", f"{chosen.version_text}, {chosen.program}")


def _runtime(found: Inspection, environ: Mapping[str, str]) -> Iterator[Finding]:
    """The images are as the runtime asked for them: only the same one can restore them."""
    if found.archive is None or not found.archive.runtime:
        return
    runtime = Path(found.archive.runtime).name
    handlers = kubernetes.crio_handlers(kubernetes.crio_config())  # CRI-O's archives name one
    program = re.sub(_SHIM, r"containerd-shim-\1-\2", handlers.get(runtime, runtime))
    if which(program, path=environ.get("PATH")) is None:
        text = f"the checkpoint was made by {runtime}, which is not here"
        yield problem("runtime", text, f"install {runtime}: only it can restore this")
    else:
        yield ok("runtime", runtime)


def _parent(found: Inspection, is_archive: bool) -> Iterator[Finding]:
    name = "parent"
    if found.parent is None:
        yield ok(name, "it needs no other checkpoint")
        return
    identity = found.parent.checkpoint_id
    place: str | Path | None = None
    if found.parent.state == State.RIGHT:
        place = found.parent.directory
    if place is None and (is_archive or found.parent.state != State.REPLACED):
        place = find_checkpoint(bytes.fromhex(identity))
    if place is None:
        yield problem(
            name,
            f"it is built on checkpoint {identity}, which is neither where its link leads nor in "
            f"{STORE_ROOT / 'checkpoints'} or {STORE_ROOT / 'containers'}/*",
            "copy that one there, or make a whole one where it is: gpustasis flatten",
        )
    else:
        yield ok(name, str(place))


def _gpus(found: Inspection, driver_library: str, nvml_library: str) -> Iterator[Finding]:
    if not found.gpus:
        yield ok("GPU", "it holds no GPU memory")
        return
    try:
        driver = Driver(driver_library)
        version = answer_within(ANSWER_S, "cuDriverGetVersion", driver.version)
        devices = list_devices_within(driver)
    except DriverError as exc:
        yield problem("CUDA driver", str(exc), "restore it on a host with a GPU and its driver")
        return
    yield _driver(found, version)
    yield from _models(found, devices, version)
    yield _gpu_memory(found, devices, nvml_library)


def _driver(found: Inspection, version: int) -> Finding:
    name = "CUDA driver"
    here, there = _cuda(version), _cuda(found.driver_api_version)
    made = f"{there} (driver {found.driver_version or 'not known'})"
    if version < found.driver_api_version:
        text = f"it was made with CUDA {made}, this driver has {here} only"
        remedy = "restore it where the driver is of that version: CRIU opens its libraries again"
        return problem(name, text, remedy)
    return ok(name, f"CUDA {here}; the checkpoint is of {made}")


def _models(found: Inspection, devices: tuple[Device, ...], version: int) -> Iterator[Finding]:
    needed = found.needed_gpus()
    wanted = Counter(gpu.name for gpu in needed)
    present = Counter(device.name for device in devices)
    lacking = wanted - present
    if lacking:
        text = ", ".join(f"{count} x {name}" for name, count in sorted(lacking.items()))
        here = ", ".join(f"{count} x {name}" for name, count in sorted(present.items())) or "none"
        remedy = "restore it on a host with as many GPUs of the same models"
        yield problem("GPU", f"lacking {text}; here: {here}", remedy)
        return
    uuids = {device.uuid for device in devices}
    others = [gpu.uuid for gpu in needed if gpu.uuid not in uuids]
    if others and version < _OTHER_GPUS:
        text = f"{', '.join(others)} not here, and this driver restores on the same GPUs only"
        remedy = "restore it where these GPUs are; dumps with driver 580 or newer go to others, too"
        yield problem("GPU", text, remedy)
    elif others:
        yield ok("GPU", f"as many of the same models; other ones take the place of {len(others)}")
    else:
        yield ok("GPU", "the same ones")


def _gpu_memory(found: Inspection, devices: tuple[Device, ...], nvml_library: str) -> Finding:
    name = "GPU memory"
    needed = _gpu_bytes(found)
    total = sum(device.memory_size for device in devices)
    try:
        used = nvml.memory_used(nvml_library)
        unknown = ""
    except DriverError as exc:
        used = 0
        unknown = f"; how much of it is in use is not known: {exc}"
    free = total - used
    text = f"{mib(needed)} needed, {mib(free)} {'there' if unknown else 'free'}"
    text += f" on {len(devices)} GPU(s){unknown}"
    if needed > free:
        return problem(name, text, "end what uses the GPUs, or take a host with more memory")
    for need, size, model in _by_gpu(found, devices):
        if need > size:
            text = f"{mib(need)} needed on one {model}, which has {mib(size)} here"
            return problem(name, text, "take a host whose GPUs have as much memory")
    return note(name, text) if unknown else ok(name, text)


def _by_gpu(found: Inspection, devices: tuple[Device, ...]) -> Iterator[tuple[int, int, str]]:
    """What the processes used on each GPU, the memory of one of its model here, and the model:
    the largest need first, with the largest memory."""
    used: Counter[str] = Counter()
    for process in found.processes:
        for gpu in () if process.cuda is None else process.cuda.gpus:
            used[gpu.uuid] += gpu.memory_bytes or 0
    for model in sorted({gpu.name for gpu in found.needed_gpus()}):
        needs = sorted((used[g.uuid] for g in found.needed_gpus() if g.name == model), reverse=True)
        sizes = sorted((d.memory_size for d in devices if d.name == model), reverse=True)
        for need, size in zip(needs, sizes, strict=False):
            yield need, size, model


def _cpu_memory(found: Inspection) -> Iterator[Finding]:
    """Whatever the configuration here says of dumps: what a checkpoint is, it says itself."""
    count = sum(process.cpu_memory is not None for process in found.processes)
    if count:
        text = (
            f"{mib(_cpu_bytes(found))} of {plural(count, 'process', 'es')} in images of gpustasis"
        )
        yield ok(cpu_memory.NAME, f"{text}; our plugin fills it at a restore")
    else:
        yield ok(cpu_memory.NAME, "in CRIU's own images")


def _host_memory(found: Inspection) -> Iterator[Finding]:
    """The driver takes GPU memory from host memory of the task; CPU memory is filled at once."""
    needed = _plain_bytes(found)
    if not needed:
        return
    free = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    purposes = [
        (_gpu_bytes(found), "to stage GPU memory"),
        (_cpu_bytes(found), "for CPU memory"),
    ]
    text = ", ".join(f"{mib(size)} needed {purpose}" for size, purpose in purposes if size)
    text += f", {mib(free)} free"
    if needed > free:
        yield problem("host memory", text, "free memory, or take a host with more of it")
    else:
        yield ok("host memory", text)


def _mounts(spec: bytes | None) -> Iterator[Finding]:
    """Files of the host that the container has mounted: for a GPU they carry the driver's
    version."""
    if spec is None:
        return
    try:
        mounts = json.loads(spec).get("mounts") or []
        sources = [
            m["source"]
            for m in mounts
            if "bind" in (m.get("options") or [m.get("type")])
            or "rbind" in (m.get("options") or [])
        ]
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as exc:
        yield problem("mounts", f"its {SPEC} is damaged: {exc!r}", "make a new checkpoint")
        return
    absent = [
        source
        for source in sources
        if isinstance(source, str)
        and source.startswith("/")
        and not source.startswith(_MADE_ANEW)
        and not os.path.exists(source)  # False for what can be no name, too
    ]
    if absent:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        yield problem(
            "mounts",
            f"the container has {', '.join(absent[:3])}{more} mounted, which is not on this host",
            "for files of the driver: the same driver version as on the other host; else make them",
        )
    elif sources:
        yield ok("mounts", "what the container has mounted is on this host")


def _plain_bytes(found: Inspection) -> int:
    return _gpu_bytes(found) + _cpu_bytes(found)


def _gpu_bytes(found: Inspection) -> int:
    return sum(
        process.cuda.image.plain_bytes
        for process in found.processes
        if process.cuda is not None and process.cuda.image is not None
    )


def _cpu_bytes(found: Inspection) -> int:
    images = [process.cpu_memory for process in found.processes]
    return sum(image.plain_bytes for image in images if image is not None)


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
