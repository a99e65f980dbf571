# SPDX-License-Identifier: Apache-2.0
"""`gpustasis doctor` on a host with container engines: what is wrong is brought about, and named.

Where a condition makes a checkpoint fail, the checkpoint is tried as well: the test would not hold
if the diagnosis were wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpustasis.install import layout
from gpustasis.install.installation import install
from gpustasis.install.root import Root
from runtimes.test_engine_root import COUNT, wait_for_more
from support.engine_image import IMAGE, import_image
from support.engine_root import EngineRoot

PROGRAMS = Path(__file__).resolve().parent.parent / "programs"
Findings = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineRoot]:
    with EngineRoot(tmp_path_factory.mktemp("host")) as engines:
        import_image(engines)
        yield engines


def doctor(engines: EngineRoot) -> Findings:
    found: Findings = {}
    for item in json.loads(engines.run("gpustasis", "doctor", "--json", check=False).stdout)[
        "findings"
    ]:
        found.setdefault(item["name"], []).append(item)
    return found


def problems(found: Findings, name: str) -> str:
    """What it says, and to do about it."""
    texts = [
        f"{f['text']} -> {f['remedy']}" for f in found.get(name, []) if f["status"] == "problem"
    ]
    assert texts, found.get(name)
    return "\n".join(texts)


def checkpoint(engines: EngineRoot, runtime: str) -> tuple[int, str]:
    """Of a container made for it: the status, and what Podman and CRIU's log say."""
    name = f"doctor-{runtime}"
    engines.run(
        *["podman", "--runtime", runtime, "run", "--detach", "--network", "none"],
        *["--name", name, IMAGE, "/bin/sh", "-c", COUNT],
    )
    wait_for_more(engines, name)
    done = engines.run("podman", "container", "checkpoint", "--keep", name, check=False)
    log = engines.path("/var/lib/containers").glob("storage/*/*/userdata/dump.log")
    said = done.stderr + "".join(path.read_text(errors="replace") for path in log)
    engines.run("podman", "rm", "--force", "--time", "0", name)
    return done.returncode, said


def set_up(engines: EngineRoot) -> None:
    with Root(engines.path("/")) as root:
        install(root, "1.0", sys.executable, lambda change: None)


def test_before_and_after_install(host: EngineRoot) -> None:
    found = doctor(host)
    (nothing,) = found["installation"]
    assert nothing["status"] == "note"
    assert "do not use gpustasis" in nothing["text"]
    assert not [name for name in found if name.startswith("plugin for")]
    for name in ("runc", "crun", "podman", "containerd", "cgroup freezer"):
        assert [item["status"] for item in found[name]] == ["ok"], found[name]

    set_up(host)
    found = doctor(host)
    for name in (
        "OCI hook",
        "installation",
        "plugin for runc",
        "plugin for crun",
        "plugin for criu by hand",
    ):
        assert [item["status"] for item in found[name]] == ["ok"], found[name]


def test_everything_that_can_be_wrong(host: EngineRoot, compile_c: Callable[..., Path]) -> None:
    set_up(host)
    assert checkpoint(host, "runc")[0] == 0

    newer = compile_c(PROGRAMS / "newer_plugin.c", "-shared", "-fPIC")
    stray = host.path(f"{layout.PLUGIN_DIRECTORY}/newer_plugin.so")
    stray.write_bytes(newer.read_bytes())
    host.path(layout.HOOK).unlink()
    host.write(
        "/etc/containers/containers.conf.d/99-own.conf", '[engine]\nhooks_dir = ["/opt/h"]\n'
    )
    host.write(
        "/etc/containers/oci/hooks.d/oci-nvidia-hook.json",
        '{"version": "1.0.0", "hook": {"path": "/usr/bin/nvidia-container-runtime-hook"}}',
    )
    host.write(
        "/etc/nvidia-container-runtime/config.toml",
        '[nvidia-container-runtime]\nmode = "legacy"\n',
    )
    default = host.path("/etc/criu/default.conf")
    default.write_text("timeout 3\n" + default.read_text())
    library = next(host.path("/usr/lib/x86_64-linux-gnu").glob("libcriu.so.2.*"))
    away = host.path("/opt") / library.name
    library.rename(away)
    host.run("ldconfig")

    found = doctor(host)
    assert "newer_plugin.so needs added_in_criu_9" in problems(found, "other plugin")
    assert f"{layout.HOOK}: it is missing" not in problems(found, "installation")
    assert "holds newer_plugin.so, which criu would load as well" in problems(found, "installation")
    assert "99-own.conf: hooks_dir = ['/opt/h'] leaves out" in problems(found, "podman")
    hooks = problems(found, "NVIDIA's legacy hook")
    assert "oci-nvidia-hook.json: its mounts are in no config.json" in hooks
    assert 'mode = "legacy"' in hooks
    assert "nvidia-ctk cdi generate" in hooks
    (timeout,) = found["criu timeout"]
    assert "default.conf, line 1: timeout 3" in timeout["text"]
    assert "libcriu.so.2, by which it calls criu, is not there" in problems(found, "crun")
    status, said = checkpoint(host, "runc")
    assert status != 0
    assert said.rstrip().endswith('Plugin "newer_plugin" (version 512 hooks 12)')  # its last words
    assert checkpoint(host, "crun")[0] != 0

    stray.unlink()
    away.rename(library)
    host.run("ldconfig")
    found = doctor(host)
    assert f"{layout.HOOK}: it is missing" in problems(found, "installation")
    assert "No such file or directory" in problems(found, "OCI hook")
    assert "other plugin" not in found
    assert [item["status"] for item in found["crun"]] == ["ok"]


def test_a_plugin_directory_that_is_not_there(host: EngineRoot) -> None:
    set_up(host)
    runc = host.path("/etc/criu/runc.conf")
    text = runc.read_text()
    runc.write_text(text.replace(layout.PLUGIN_DIRECTORY, "/opt/nothing"))
    host.path("/opt/empty").mkdir(exist_ok=True)
    host.write("/etc/criu/crun.conf", "libdir /opt/empty\n")
    found = doctor(host)
    assert "libdir /opt/nothing is not there: criu ends every dump" in problems(
        found, "plugin for runc"
    )
    assert "libdir /opt/empty holds no cuda_plugin.so" in problems(found, "plugin for crun")
    runc.write_text(text)
    host.path("/etc/criu/crun.conf").unlink()


def test_a_hook_whose_python_is_gone(host: EngineRoot) -> None:
    set_up(host)
    hook = host.path(layout.HOOK)
    text = hook.read_text()
    hook.write_text(text.replace("gpustasis.oci_hook", "gpustasis.gone"))
    found = doctor(host)
    assert "No module named 'gpustasis.gone'" in problems(found, "OCI hook")
    assert f"{layout.HOOK}: it is not that of this version" in problems(found, "installation")
    set_up(host)
    assert hook.read_text() == text


def test_a_line_that_criu_cannot_read(host: EngineRoot) -> None:
    set_up(host)
    runc = host.path("/etc/criu/runc.conf")
    text = runc.read_text()
    runc.write_text(text + "--tcp-established\n")
    found = doctor(host)
    line = text.count("\n") + 1
    said = problems(found, "CRIU configuration")
    assert f"/etc/criu/runc.conf, line {line}: '--tcp-established' is not the name" in said
    assert checkpoint(host, "runc")[0] != 0
    runc.write_text(text)


def test_a_crun_that_reads_no_configuration_of_its_own(host: EngineRoot) -> None:
    """crun without the name of its file in it: for checkpoints that is crun before 1.26."""
    crun = host.path("/usr/bin/crun").read_bytes()
    old = host.path("/usr/local/bin/crun")
    old.write_bytes(crun.replace(b"/etc/criu/crun.conf\0", b"/etc/criu/none.conf\0"))
    old.chmod(0o755)
    (finding,) = doctor(host)["crun"]
    assert finding["status"] == "note"
    assert "is older than 1.26" in finding["text"]
    old.unlink()


def test_a_cdi_specification_of_another_driver(host: EngineRoot) -> None:
    """As after an upgrade of the driver: what it names is not there, and no container starts."""
    host.run("gpustasis", "emulator", "start", "--gpus", "1", "--driver", "580.95.05")
    environ = {
        name: value
        for name, _, value in (
            line.removeprefix("export ").partition("=")
            for line in host.run("gpustasis", "emulator", "env").stdout.splitlines()
        )
    }
    host.write(
        "/etc/cdi/nvidia.yaml",
        "cdiVersion: 0.6.0\nkind: nvidia.com/gpu\ndevices:\n- name: all\n  containerEdits:\n"
        "    mounts:\n    - hostPath: /usr/lib/libcuda.so.570.1.2\n"
        "      containerPath: /usr/lib/libcuda.so.570.1.2\n      options: [bind]\n",
    )
    said = host.run("gpustasis", "doctor", "--json", check=False, environ=environ).stdout
    texts = [f["text"] for f in json.loads(said)["findings"] if f["name"] == "CDI"]
    assert texts == ["/etc/cdi/nvidia.yaml is for driver 570.1.2; this host has 580.95.05"]
    run = ["podman", "run", "--rm", "--network", "none", "--device", "nvidia.com/gpu=all"]
    assert host.run(*run, IMAGE, "/bin/sh", "-c", "exit 0", check=False).returncode != 0
    host.path("/etc/cdi/nvidia.yaml").unlink()
    host.run("gpustasis", "emulator", "stop")
