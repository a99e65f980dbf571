# SPDX-License-Identifier: Apache-2.0
"""What `gpustasis doctor` says of CPU memory: who is to store it, and whether that can be done."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from gpustasis.criu.find import Criu
from gpustasis.criu.plugin import format_config
from gpustasis.diagnosis import Finding, Status, cpu_memory, restorability
from gpustasis.diagnosis.container import Container
from gpustasis.errors import CriuError
from gpustasis.image.inspection import inspect_directory
from support.chains import make_link, memory_of
from support.criu_roots import newest_criu
from support.job import Job

IDENTITY = "0123456789abcdef" * 4
NO_SCAN = "this kernel has no PAGEMAP_SCAN"
PROGRAM = "int ioctl(int, unsigned long, ...); int main(void) { return ioctl(0, 0) == 0; }\n"


@pytest.fixture
def environ(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """environ(cpu_memory=...): with a configuration that says so, and nothing else."""

    def make(**settings: str | int) -> dict[str, str]:
        path = tmp_path / "config.toml"
        path.write_text(format_config(settings))
        return {"GPUSTASIS_CONFIG": str(path)}

    return make


@pytest.fixture
def without_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel before 6.7 answers: any file that has no such call does."""
    monkeypatch.setattr(cpu_memory.why_no_page_scan, "__defaults__", (Path(os.devnull),))


def criu_of(program: Path) -> Criu:
    return Criu(program=program, root=None, version=(4, 2), origin="--criu")


def compiled(compile_c: Callable[..., Path], tmp_path: Path, *flags: str) -> Path:
    source = tmp_path / "calls_ioctl.c"
    source.write_text(PROGRAM)
    return compile_c(source, *flags)


def test_what_the_configuration_says_is_told(
    environ: Callable[..., dict[str, str]], criu: Criu
) -> None:
    """The kernel here has PAGEMAP_SCAN, and each criu of these tests can be led."""
    asked = environ(cpu_memory="ours")
    found = cpu_memory.check(asked, criu)
    assert found.status is Status.OK
    said = f'cpu_memory = "ours" in {asked["GPUSTASIS_CONFIG"]}'
    assert found.text == f"the plugin stores it ({said})"
    found = cpu_memory.check(environ(cpu_memory="auto"), criu)
    assert found.status is Status.OK and "of processes that have much" in found.text
    for config in (environ(threads=2), environ(cpu_memory="criu")):
        found = cpu_memory.check(config, criu)
        assert found.status is Status.OK
        assert found.text == 'CRIU stores it (cpu_memory = "criu")'


@pytest.mark.parametrize("value", ["Ours", 3])
def test_what_the_plugin_would_not_take_is_a_problem(
    environ: Callable[..., dict[str, str]], value: str | int
) -> None:
    found = cpu_memory.check(environ(cpu_memory=value), None)
    assert found.status is Status.PROBLEM
    assert "every dump fails" in found.text and found.remedy == "it is one of criu, ours, auto"


@pytest.mark.usefixtures("without_scan")
def test_a_kernel_without_pagemap_scan(environ: Callable[..., dict[str, str]]) -> None:
    found = cpu_memory.check(environ(cpu_memory="ours"), None)
    assert found.status is Status.PROBLEM and "every dump fails: " + NO_SCAN in found.text
    assert found.remedy == 'set cpu_memory = "auto" or "criu"'
    found = cpu_memory.check(environ(cpu_memory="auto"), None)
    assert found.status is Status.NOTE and "left to CRIU: " + NO_SCAN in found.text
    assert cpu_memory.check(environ(), None).status is Status.OK


@pytest.mark.parametrize("flags", [["-static"], ["-fno-plt"], ["-Wl,-z,now"], ["-no-pie"]], ids=str)
def test_only_a_criu_whose_calls_can_be_led_will_do(
    environ: Callable[..., dict[str, str]],
    compile_c: Callable[..., Path],
    tmp_path: Path,
    flags: list[str],
) -> None:
    criu = criu_of(compiled(compile_c, tmp_path, *flags))
    found = cpu_memory.check(environ(cpu_memory="ours"), criu)
    if flags != ["-static"]:
        assert found.status is Status.OK, found
        return
    assert found.status is Status.PROBLEM
    assert "does not import ioctl (is it linked statically?)" in found.text
    assert cpu_memory.check(environ(cpu_memory="auto"), criu).status is Status.NOTE
    assert cpu_memory.check(environ(), criu).status is Status.OK


def test_a_restore_needs_one_as_well(compile_c: Callable[..., Path], tmp_path: Path) -> None:
    """Where there is memory to fill: processes that lack some must not outlive criu."""
    source = tmp_path / "says_its_version.c"
    source.write_text('#include <stdio.h>\nint main(void) { puts("Version: 4.2"); return 0; }\n')
    program = str(compile_c(source, "-static"))
    memory = {7: memory_of(["A"])}
    make_link(tmp_path / "cpu", {}, cpu_memory=memory)
    make_link(tmp_path / "gpu", memory)

    def criu(name: str, program: str) -> Finding:
        found = restorability.check(tmp_path / name, {}, program, "libno-such.so", "libno-such.so")
        return next(one for one in found if one.name == "CRIU")

    for name in ("cpu", "gpu"):
        found = criu(name, program)
        assert found.status is Status.PROBLEM and "does not import ptrace" in found.text
        newest = newest_criu()
        assert criu(name, str(newest.root or newest.program)).status is Status.OK


def test_what_a_criu_calls_is_known(
    criu: Criu, compile_c: Callable[..., Path], tmp_path: Path
) -> None:
    assert {"ioctl", "ptrace"} <= cpu_memory.imported_functions(criu.program)
    assert "ptrace" not in cpu_memory.imported_functions(compiled(compile_c, tmp_path))
    script = tmp_path / "criu"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(CriuError, match="not a sound ELF file"):
        cpu_memory.imported_functions(script)
    assert "not a sound ELF file" in cpu_memory.why_not_led(script, "ioctl")


class TestOfAContainer:
    @pytest.fixture
    def judge(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, launch: Callable[..., Job]
    ) -> Callable[..., Finding]:
        """What is found of a container with this policy file, and with processes that have the
        same pid in their namespaces if `twins`."""
        policies = tmp_path / "policy"
        policies.mkdir()
        monkeypatch.setattr(cpu_memory, "POLICY_DIRECTORY", str(policies))
        in_own = ["/usr/bin/unshare", "--pid", "--fork", "--kill-child", "/bin/sleep", "1000"]

        def find(
            environ: dict[str, str], policy: str | None = None, *, twins: bool = False
        ) -> Finding:
            if policy is not None:
                (policies / f"{IDENTITY}.toml").write_text(policy)
            jobs = [launch(in_own if twins else ["/bin/sleep", "1000"]) for _ in range(2)]
            pids = tuple(first_child(job.pid) if twins else job.pid for job in jobs)
            group = f"/machine.slice/libpod-{IDENTITY}.scope"
            container = Container(name="x", init=pids[0], tasks=pids, group=group, config=None)
            return cpu_memory.check_container(container, environ, None)

        return find

    def test_its_annotation_wins(
        self, judge: Callable[..., Finding], environ: Callable[..., dict[str, str]]
    ) -> None:
        found = judge(environ(cpu_memory="criu"), 'cpu_memory = "ours"\n[container]\nid = "x"\n')
        assert found.status is Status.OK
        assert f"{IDENTITY}.toml" in found.text and "the plugin stores it" in found.text
        found = judge(environ(cpu_memory="ours"), 'cpu_memory = "criu"\n')
        assert found.text == 'CRIU stores it (cpu_memory = "criu")'

    def test_without_one_the_configuration_counts(
        self, judge: Callable[..., Finding], environ: Callable[..., dict[str, str]]
    ) -> None:
        for policy in (None, "threads = 2\n"):
            assert "config.toml" in judge(environ(cpu_memory="ours"), policy).text

    def test_a_policy_that_cannot_be_read_is_a_problem(
        self, judge: Callable[..., Finding], environ: Callable[..., dict[str, str]]
    ) -> None:
        found = judge(environ(), "cpu_memory = \n")
        assert found.status is Status.PROBLEM and "policy cannot be read" in found.text

    def test_two_processes_with_one_pid(
        self, judge: Callable[..., Finding], environ: Callable[..., dict[str, str]]
    ) -> None:
        found = judge(environ(cpu_memory="ours"), twins=True)
        assert found.status is Status.PROBLEM and "have one pid" in found.text
        assert judge(environ(cpu_memory="auto"), twins=True).status is Status.NOTE
        assert judge(environ(), twins=True).status is Status.OK


def first_child(pid: int) -> int:
    """Of `unshare --fork`, once it is there."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    while not (found := children.read_text().split()):
        assert Path(f"/proc/{pid}").exists()
    return int(found[0])


def test_the_command_says_it(
    gpustasis: Callable[..., CompletedProcess[str]],
    emulator_environ: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    environ: Callable[..., dict[str, str]],
    tmp_path: Path,
) -> None:
    def said(*words: str | Path) -> dict[str, Any]:
        ended = gpustasis("doctor", "--json", *words)
        found = {one["name"]: one for one in json.loads(ended.stdout)["findings"]}
        return {name: found[name] for name in ("CPU memory", "host memory") if name in found}

    assert said()["CPU memory"]["text"] == 'CRIU stores it (cpu_memory = "criu")'
    for name, value in environ(cpu_memory="ours").items():
        monkeypatch.setitem(emulator_environ, name, value)
    assert said()["CPU memory"]["text"].startswith("the plugin stores it")
    checkpoint = tmp_path / "checkpoint"
    make_link(checkpoint, {}, cpu_memory={7: memory_of(["A"] * 512)})
    assert inspect_directory(checkpoint).gpus == ()
    found = said("--archive", checkpoint)
    assert found["CPU memory"]["text"].startswith("2.0 MiB of 1 process in images of gpustasis")
    assert found["host memory"]["text"].startswith("2.0 MiB needed for CPU memory, ")
    make_link(tmp_path / "gpu", {7: memory_of(["A"] * 512)})
    found = said("--archive", tmp_path / "gpu")
    assert found["CPU memory"]["text"] == "in CRIU's own images"
    assert found["host memory"]["text"].startswith("2.0 MiB needed to stage GPU memory, ")
