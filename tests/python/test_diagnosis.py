# SPDX-License-Identifier: Apache-2.0
"""Each finding is seen both ways where the condition can be brought about without harm."""

from __future__ import annotations

import resource
import socket
import threading
from pathlib import Path

import pytest

from gpustasis.criu.find import Criu
from gpustasis.diagnosis import Finding, Status, host, kubernetes

ALL_CAPABILITIES = (1 << 41) - 1
SYS_PTRACE, SYS_ADMIN, SYS_RESOURCE, CHECKPOINT_RESTORE = 1 << 19, 1 << 21, 1 << 24, 1 << 40


def proc(
    directory: Path, *, capabilities: int = ALL_CAPABILITIES, yama: int | None = 0, nr_open: int = 1
) -> Path:
    """A /proc that says so."""
    (directory / "self").mkdir(parents=True)
    (directory / "sys/fs").mkdir(parents=True)
    (directory / "self/status").write_text(f"Name:\tx\nCapEff:\t{capabilities:016x}\n")
    (directory / "sys/fs/nr_open").write_text(f"{nr_open}\n")
    if yama is not None:
        (directory / "sys/kernel/yama").mkdir(parents=True)
        (directory / "sys/kernel/yama/ptrace_scope").write_text(f"{yama}\n")
    return directory


def statuses(findings: list[Finding]) -> dict[str, Status]:
    return {finding.name: finding.status for finding in findings}


@pytest.mark.parametrize(
    ("capabilities", "status"),
    [
        (SYS_PTRACE | SYS_ADMIN, Status.OK),
        (SYS_PTRACE | CHECKPOINT_RESTORE, Status.OK),
        (SYS_ADMIN, Status.PROBLEM),
        (SYS_PTRACE, Status.PROBLEM),
        (0, Status.PROBLEM),
    ],
)
def test_capabilities(tmp_path: Path, capabilities: int, status: Status) -> None:
    findings = host.check_privileges(proc(tmp_path, capabilities=capabilities))
    assert statuses(findings)["capabilities"] is status


@pytest.mark.parametrize(
    ("scope", "capabilities", "status"),
    [
        (None, 0, Status.OK),
        (0, 0, Status.OK),
        (1, 0, Status.PROBLEM),
        (1, SYS_PTRACE, Status.OK),
        (2, SYS_PTRACE, Status.OK),
        (3, ALL_CAPABILITIES, Status.PROBLEM),
    ],
)
def test_yama(tmp_path: Path, scope: int | None, capabilities: int, status: Status) -> None:
    findings = host.check_privileges(proc(tmp_path, capabilities=capabilities, yama=scope))
    assert statuses(findings)["yama"] is status


@pytest.mark.parametrize(
    ("beyond_limit", "capabilities", "status"),
    [(0, 0, Status.OK), (1, 0, Status.PROBLEM), (1, SYS_RESOURCE, Status.OK)],
)
def test_open_files(tmp_path: Path, beyond_limit: int, capabilities: int, status: Status) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    where = proc(tmp_path, capabilities=capabilities, nr_open=hard + beyond_limit)
    finding = host.check_privileges(where)[-1]
    assert finding.status is status
    if status is Status.PROBLEM:
        assert f"sysctl fs.nr_open={hard}" in finding.remedy


def test_this_kernel_has_what_the_tests_need() -> None:
    found = statuses(host.check_kernel())
    soft_dirty = found.pop("CONFIG_MEM_SOFT_DIRTY")
    assert soft_dirty in (Status.OK, Status.NOTE)
    assert found.pop("io_uring") in (Status.OK, Status.NOTE)  # a note: programs may use it
    assert set(found.values()) == {Status.OK}


@pytest.mark.parametrize(
    ("value", "status"),
    [("2", Status.OK), ("1", Status.NOTE), ("0", Status.NOTE), ("", Status.NOTE)],
)
def test_io_uring(tmp_path: Path, value: str, status: Status) -> None:
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/io_uring_disabled").write_text(value)
    assert host.io_uring(tmp_path).status is status


@pytest.mark.parametrize(("enabled", "status"), [("1", Status.OK), ("0", Status.PROBLEM)])
def test_a_freezer_of_cgroup_v1(tmp_path: Path, enabled: str, status: Status) -> None:
    table = f"#subsys_name\thierarchy\tnum_cgroups\tenabled\nfreezer\t3\t1\t{enabled}\n"
    (tmp_path / "cgroups").write_text(table)
    assert host.freezer(tmp_path, tmp_path).status is status


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("[always] madvise never\n", Status.OK),
        ("always [madvise] never\n", Status.NOTE),
        ("always madvise [never]\n", Status.NOTE),
    ],
)
def test_pages_of_what_the_driver_stages(tmp_path: Path, text: str, status: Status) -> None:
    setting = tmp_path / "enabled"
    setting.write_text(text)
    found = host.staging_pages(setting)
    assert found.status is status
    assert str(setting) in found.remedy or status is Status.OK
    assert host.staging_pages(tmp_path / "missing").status is Status.NOTE


def look(driver_library: str) -> list[Finding]:
    return host.check_gpus(driver_library, host.find_driver_version("libno-such-nvml.so.1"))


def test_a_missing_driver_is_a_problem_that_names_the_emulator_as_a_way_out() -> None:
    driver, nvml = look("libno-such-driver.so.1")
    assert (driver.status, nvml.status) == (Status.PROBLEM, Status.NOTE)
    assert "libno-such-driver.so.1" in driver.text
    assert "gpustasis emulator run" in driver.remedy


def test_a_library_that_is_no_driver_is_a_problem() -> None:
    (driver, _) = look("libc.so.6")
    assert driver.status is Status.PROBLEM
    assert "570 or newer" in driver.text


def environment(criu: Criu, **more: str) -> dict[str, str]:
    return {"GPUSTASIS_CRIU": str(criu.root or criu.program), "PATH": "/usr/bin:/bin"} | more


def test_criu_and_the_packages_plugin_are_fine(criu: Criu) -> None:
    findings = host.check_criu(environment(criu), None)
    assert set(statuses(findings).values()) == {Status.OK}
    assert criu.version_text in findings[0].text


def test_no_criu_is_a_problem(tmp_path: Path) -> None:
    findings = host.check_criu({"GPUSTASIS_CRIU": str(tmp_path / "criu")}, None)
    assert statuses(findings)["CRIU"] is Status.PROBLEM


def test_a_plugin_that_does_not_load_is_a_problem(criu: Criu, tmp_path: Path) -> None:
    (tmp_path / "cuda_plugin.so").write_bytes(b"no library")
    findings = host.check_criu(environment(criu, GPUSTASIS_PLUGIN_DIR=str(tmp_path)), None)
    (plugin,) = [finding for finding in findings if finding.name == "plugin"]
    assert plugin.status is Status.PROBLEM
    assert "does not load" in plugin.text


def test_a_second_plugin_in_the_directory_is_a_problem(criu: Criu, tmp_path: Path) -> None:
    (tmp_path / "cuda_plugin.so").touch()
    (tmp_path / "amdgpu_plugin.so").touch()
    findings = host.check_criu(environment(criu, GPUSTASIS_PLUGIN_DIR=str(tmp_path)), None)
    (plugin,) = [finding for finding in findings if finding.name == "plugin"]
    assert plugin.status is Status.PROBLEM
    assert "amdgpu_plugin.so" in plugin.text


def test_a_broken_configuration_is_a_problem(criu: Criu, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("threads = \n")
    findings = host.check_criu(environment(criu, GPUSTASIS_CONFIG=str(config)), None)
    assert statuses(findings)["configuration"] is Status.PROBLEM


@pytest.mark.parametrize(
    ("level", "status", "text"),
    [
        ("checkpoint_restore", Status.OK, "checkpoints and restores"),
        ("checkpoint_only", Status.NOTE, 'it restores nothing: container_level_enabled = "check'),
        ("none", Status.PROBLEM, "it refuses checkpoints"),
    ],
)
def test_what_cri_o_is_allowed(tmp_path: Path, level: str, status: Status, text: str) -> None:
    """As releases since August 2026 answer; the one that tests run has no such key."""
    body = "[crio.runtime]\nenable_criu_support = true\n"
    body += f'[crio.checkpoint_restore]\ncontainer_level_enabled = "{level}"\n'
    place = tmp_path / "crio.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place))
        server.listen()

        def answer() -> None:
            with server.accept()[0] as client:
                assert client.recv(1000).startswith(b"GET /config HTTP/1.0\r\n")
                client.sendall(f"HTTP/1.0 200 OK\r\nA: b\r\n\r\n{body}".encode())

        thread = threading.Thread(target=answer)
        thread.start()
        config = kubernetes.crio_config(place)
        thread.join()
    (finding,) = kubernetes.check_crio(config, place)
    assert finding.status is status
    assert text in finding.text
    assert kubernetes.crio_config(place) == {}  # nobody listens any more
    (finding,) = kubernetes.check_crio({}, place)
    assert finding.status is Status.NOTE


@pytest.mark.parametrize(
    ("version", "words", "config", "status"),
    [
        ("Kubernetes v1.36.3", "", "", Status.OK),
        ("Kubernetes v1.29.9", "", "", Status.PROBLEM),
        ("Kubernetes v1.29.9", "", "featureGates:\n  ContainerCheckpoint: true\n", Status.OK),
        ("Kubernetes v1.30.0", "", '{"featureGates": {"ContainerCheckpoint": false}}', "problem"),
        ("Kubernetes v1.30.0", "", "# ContainerCheckpoint: false\n", Status.OK),
        ("Kubernetes v1.36.3", "--feature-gates A=true,ContainerCheckpoint=false", "", "problem"),
        ("Kubernetes v1.36.3", "--feature-gates=ContainerCheckpoint=false", "", Status.PROBLEM),
        ("nonsense", "", "", Status.OK),
    ],
)
def test_kubelets(tmp_path: Path, version: str, words: str, config: str, status: Status) -> None:
    """A made-up /proc, for no other versions are here; tests/kubernetes has the real one."""
    process = kubelet(tmp_path, version, words, config)
    (finding,) = kubernetes.check_kubelet(tmp_path)
    assert (finding.name, finding.status) == ("kubelet", status)
    assert (process / "run").exists()


def kubelet(proc: Path, version: str, words: str, config: str) -> Path:
    """Its directory there. It says when it is run, by a file `run`."""
    process = proc / "1234"
    (process / "root/etc").mkdir(parents=True)
    (process / "comm").write_text("kubelet\n")
    (process / "status").write_text("Name:\tkubelet\nUid:\t0\t0\t0\t0\n")
    (process / "root/etc/kubelet.yaml").write_text(config)
    cmdline = ["kubelet", "--config=/etc/kubelet.yaml", *words.split(" "), ""]
    (process / "cmdline").write_text("\0".join(cmdline))
    (process / "exe").write_text(f"#!/bin/sh\ntouch {process}/run\necho {version}\n")
    (process / "exe").chmod(0o755)
    for place in (process, proc / "1"):
        (place / "ns").mkdir(parents=True)
        for name in ("mnt", "user", "pid"):
            (place / "ns" / name).symlink_to(f"{name}:[1]")
    return process


def test_a_process_whose_name_is_no_text_hides_no_kubelet(tmp_path: Path) -> None:
    kubelet(tmp_path, "Kubernetes v1.36.3", "", "")
    (tmp_path / "1" / "comm").write_bytes(b"\xff\xfe\n")
    (finding,) = kubernetes.check_kubelet(tmp_path)
    assert finding.name == "kubelet"


@pytest.mark.parametrize("what", ["mnt", "user", "pid", "owner", "setuid program", "writable"])
def test_what_only_calls_itself_kubelet_is_not_run(tmp_path: Path, what: str) -> None:
    """As a process in a container may, or one of an ordinary user."""
    process = kubelet(tmp_path, "v1.36.3", "", "")
    if what == "owner":
        (process / "status").write_text("Uid:\t65534\t65534\t65534\t65534\n")
    elif what == "setuid program":
        (process / "status").write_text("Uid:\t65534\t0\t0\t0\n")
    elif what == "writable":
        (process / "exe").chmod(0o777)
    else:
        (process / "ns" / what).unlink()
        (process / "ns" / what).symlink_to(f"{what}:[2]")
    assert list(kubernetes.check_kubelet(tmp_path)) == []
    assert not (process / "run").exists()
