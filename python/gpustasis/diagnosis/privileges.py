"""What this process may do; criu run from here may do the same."""

from __future__ import annotations

import resource
from pathlib import Path

from gpustasis.diagnosis.finding import Finding, ok, problem

_CAPABILITIES = {  # linux/capability.h
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_RESOURCE": 24,
    "CAP_CHECKPOINT_RESTORE": 40,
}
_NO_ATTACH = 3  # ptrace_scope: nobody may, root neither


def check(proc: Path = Path("/proc")) -> list[Finding]:
    """proc: where the proc file system is mounted."""
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
