# SPDX-License-Identifier: Apache-2.0
"""`gpustasis doctor`: say what this machine lacks and what to do about it."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

import click

from gpustasis import driver, nvml
from gpustasis.cli import output
from gpustasis.cli.framework import Command
from gpustasis.criu.find import Criu, choose, find_all
from gpustasis.criu.plugin import driver_libraries
from gpustasis.diagnosis import (
    Finding,
    Status,
    container_checks,
    cpu_memory,
    host,
    installation,
    restorability,
    runtimes,
)
from gpustasis.diagnosis.container import Container, find_container
from gpustasis.errors import CheckpointError, CriuError, EngineError, UnsupportedError
from gpustasis.runtimes import containerd, cri_containers
from gpustasis.runtimes.cri import Cri
from gpustasis.text import plural

# Command of a runtime -> its socket.
_CRI_SOCKETS = {"containerd": containerd.DEFAULT_ADDRESS, "crio": containerd.CRIO_ADDRESS}
_COLOURS = {Status.OK: "green", Status.NOTE: "yellow", Status.PROBLEM: "red"}


@click.command("doctor", cls=Command)
@click.option(
    "--criu",
    "criu_program",
    metavar="PATH",
    help="The criu program to look at, or a root directory that holds one.",
)
@click.option(
    "--container",
    "container_name",
    metavar="ID",
    help="Look at this running container: can it be checkpointed? On a Kubernetes node also "
    "NAMESPACE/POD/CONTAINER.",
)
@click.option(
    "--archive",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Look at this checkpoint, an archive or a directory: can this host restore it?",
)
@click.option(
    "--rootfs",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    metavar="DIR",
    help="With --archive: compare the files that a container's processes had mapped with those in "
    "this copy of its root file system.",
)
def command(
    criu_program: str | None,
    container_name: str | None,
    archive: Path | None,
    rootfs: Path | None,
) -> None:
    """Look at driver, kernel, privileges, CRIU, plugin, installation and container runtimes; or at
    one container, or at one checkpoint.

    Each line is ok, a note, or a problem with what to do about it; the exit status is 0 if there
    is no problem.
    """
    if container_name is not None and archive is not None:
        raise click.UsageError("--container and --archive exclude each other")
    if rootfs is not None and archive is None:
        raise click.UsageError("--rootfs needs --archive")
    if container_name is not None:
        container = _container(container_name)
        findings = container_checks.check(container, *_libraries())
        criu = _criu(criu_program)
        findings.append(cpu_memory.check_container(container, os.environ, criu))
    elif archive is not None:
        findings = restorability.check(
            archive, os.environ, criu_program, *_libraries(), rootfs=rootfs
        )
    else:
        findings = diagnose(criu_program)
    output.answer({"findings": [asdict(finding) for finding in findings]}, lambda: _show(findings))
    problems = sum(finding.status is Status.PROBLEM for finding in findings)
    if problems:
        raise UnsupportedError(f"{plural(problems, 'problem')} found")


def _container(name: str) -> Container:
    """By any of the names that people have for it."""
    if "/" not in name:
        return find_container(name, os.environ)
    command, identity = _of_kubernetes(name)
    resume = f"gpustasis {command} resume {name}"
    return replace(find_container(identity, os.environ), name=name, resume=resume)


def _of_kubernetes(name: str) -> tuple[str, str]:
    """The command for the runtime that has NAMESPACE/POD/CONTAINER on this node, and its id
    there."""
    sockets = {c: path for c, path in _CRI_SOCKETS.items() if os.path.exists(path)}
    if not sockets:
        raise CheckpointError(
            f"no container {name!r} was found: this host has no container runtime of Kubernetes at "
            f"{' or '.join(_CRI_SOCKETS.values())}"
        )
    errors = []
    for command, path in sockets.items():
        try:
            with Cri(path) as cri:
                return command, cri_containers.find(cri, name, cri_containers.PERHAPS_PAUSED).id
        except EngineError as exc:
            errors.append(str(exc))
    raise CheckpointError("; ".join(errors))


def _libraries() -> tuple[str, str]:
    """The driver and NVML that the plugin would load."""
    try:
        return driver_libraries(os.environ)
    except CheckpointError:  # the finding on the configuration says what is wrong with it
        return driver.DEFAULT_LIBRARY, nvml.DEFAULT_LIBRARY


def diagnose(criu_program: str | None) -> list[Finding]:
    """All findings on this machine, in the order in which things are needed."""
    driver_library, nvml_library = _libraries()
    version = host.find_driver_version(nvml_library)
    criu = _criu(criu_program)
    return [
        *host.check_gpus(driver_library, version),
        *host.check_kernel(),
        *host.check_privileges(),
        *host.check_criu(os.environ, criu_program),
        cpu_memory.check(os.environ, criu),
        *host.check_dropped_memory(),
        *host.check_sealing(),
        *installation.check(None if criu is None else criu.program, sys.executable),
        *runtimes.check(os.environ, version if isinstance(version, str) else None),
    ]


def _criu(criu_program: str | None) -> Criu | None:
    try:
        return choose(find_all(os.environ, criu_program))
    except CriuError:
        return None


def _show(findings: list[Finding]) -> None:
    for finding in findings:
        mark = f"{finding.status.value:<8}"
        output.say(f"{finding.name}: {finding.text}", mark=mark, colour=_COLOURS[finding.status])
        if finding.remedy:
            output.say(f"{'':<8}-> {finding.remedy}")
