"""The CUDA driver and its management library."""

from __future__ import annotations

from gpustasis import nvml
from gpustasis.diagnosis.finding import Finding, note, ok, problem
from gpustasis.driver import Device, Driver
from gpustasis.errors import DriverError

MINIMUM_DRIVER = "570"


def check(driver_library: str, nvml_library: str) -> list[Finding]:
    """Look at the driver and NVML; each is loaded into this process."""
    return [*_driver(driver_library), _nvml(nvml_library)]


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
        version = driver.version()
        text = f"{library} supports CUDA {version // 1000}.{version % 1000 // 10}"
        if not driver.has_checkpoint_api():
            return [problem(name, f"{text}, without the checkpoint calls", _UPGRADE)]
        driver.init()
        devices = driver.devices()
    except DriverError as exc:
        return [problem(name, str(exc), "see what nvidia-smi and the kernel's log say")]
    emulated = any(device.emulated for device in devices)
    if emulated:
        text += "; it is the emulator: nothing here runs on a real GPU"
    driver_finding = note(name, text) if emulated else ok(name, text)
    if not devices:
        return [driver_finding, problem("GPU", "the driver lists none", "see what nvidia-smi says")]
    return [driver_finding, *(_device(number, item) for number, item in enumerate(devices))]


_UPGRADE = f"upgrade NVIDIA's driver to {MINIMUM_DRIVER} or newer"


def _device(number: int, device: Device) -> Finding:
    size_mib = device.memory_size / 2**20
    return ok(f"GPU {number}", f"{device.name}, {size_mib:.1f} MiB, {device.uuid}")


def _nvml(library: str) -> Finding:
    try:
        version = nvml.driver_version(library)
    except DriverError as exc:
        remedy = "checkpoints will not say which driver they come from; it comes with the driver"
        return note("NVML", str(exc), remedy)
    return ok("NVML", f"driver {version}")
