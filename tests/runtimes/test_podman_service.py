# SPDX-License-Identifier: Apache-2.0
"""`gpustasis podman`: through Podman's service, for real, with containers that use emulated
GPUs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpustasis.criu import log as log_errors
from gpustasis.errors import EngineError
from gpustasis.runtimes import podman
from gpustasis.runtimes.podman_service import Service
from support.engine_gpu import Steady, SteadyContainer, start_podman, write_config
from support.engine_image import IMAGE
from support.engine_root import EngineRoot
from support.json_output import check_document

MIB = 1 << 20
RUNTIMES = ["runc", "crun"]


def ask(
    root: EngineRoot, runtime: str, *words: str, check: bool = True
) -> subprocess.CompletedProcess[str]:
    url = start_podman(root, runtime)
    return root.run("gpustasis", "podman", "--url", url, *words, check=check)


def container_figures(said: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said)["container_statistics"][0]
    return found


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_figures_stand_beside_crius(steady: Steady, runtime: str) -> None:
    container = steady(f"figures-{runtime}", runtime, mib=8, children=1)
    root = container.root
    for leave in (["--leave-running"], []):
        word = "--print-stats" if leave else "--json"
        said = ask(root, runtime, "checkpoint", container.name, word, *leave).stdout
        if not leave:
            said = json.dumps(check_document(said, "podman checkpoint")["podman"])
        figures = container_figures(said)
        assert figures["Id"] == container.id()
        assert figures["criu_statistics"]["pages_written"] > 0
        ours = figures["gpustasis_statistics"]
        assert ours["backend"] == "emulator" and ours["processes"] == 2
        assert ours["staged_bytes"] >= 16 * MIB > ours["file_bytes"] > 0
        assert 0 < ours["lock_time"] < figures["runtime_checkpoint_duration"]
        assert container.state() == ("running" if leave else "exited")
    said = ask(root, runtime, "restore", container.name, "--json", "--keep").stdout
    figures = container_figures(json.dumps(check_document(said, "podman restore")["podman"]))
    assert figures["criu_statistics"]["pages_restored"] > 0
    assert figures["gpustasis_statistics"]["refill_time"] > 0
    container.run_on(2)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_chain_of_five_and_its_end_elsewhere(
    steady: Steady, elsewhere: EngineRoot, shared: Path, runtime: str
) -> None:
    """Archives hold only what their parents do not. Elsewhere, the last alone is refused, by the id
    of what it lacks; with the others it runs on."""
    name = f"chain-{runtime}"
    # Without a log: Podman cuts an archive off if the log grows while it is packed.
    container = steady(name, runtime, "--log-driver=none", mib=32)
    root = container.root
    write_config(root, "incremental = true\nchunk_size = 4096")  # more of them stay the same
    archives = [f"/mnt/shared/{name}-{number}.tar" for number in range(5)]
    try:
        for archive in archives:
            leave = [] if archive == archives[-1] else ["--leave-running"]
            figures = container_figures(
                ask(
                    root, runtime, "checkpoint", name, "-e", archive, "--print-stats", *leave
                ).stdout
            )["gpustasis_statistics"]
            assert (figures["same_bytes"] > 0) == (archive != archives[0])
    finally:
        write_config(root)
    said = [elsewhere.run("gpustasis", "inspect", "--json", archive).stdout for archive in archives]
    parents = [json.loads(text)["parent"] for text in said]
    assert parents[0] is None
    assert [parent["chain_length"] for parent in parents[1:]] == [1, 2, 3, 4]
    needed = parents[-1]["checkpoint_id"]

    there = SteadyContainer(elsewhere, name)
    url = start_podman(elsewhere, runtime)
    words = ("gpustasis", "podman", "--url", url, "restore", "--import", archives[-1])
    try:
        alone = elsewhere.run(*words, check=False)
        assert alone.returncode == 3
        assert f"is built on checkpoint {needed}" in alone.stderr
        # Podman by itself gets the same answer, from the plugin. Under another name: crun leaves a
        # group of a v1 hierarchy behind, and cannot restore a container of that id again.
        plain = ("podman", "--runtime", runtime, "container", "restore", "--import", archives[-1])
        refused = elsewhere.run(*plain, "--name", "alone", check=False)
        assert refused.returncode != 0
        made = SteadyContainer(elsewhere, "alone")
        log = elsewhere.path(made.images()).parent / "restore.log"
        assert needed in "".join(log_errors.plugin_errors(log.read_text()))
        made.remove()
        elsewhere.run(
            *words, *(word for archive in archives[:-1] for word in ("--import-parent", archive))
        )
        there.wait_for_writes()
    finally:
        there.remove()
        for archive in archives:
            (shared / Path(archive).name).unlink(missing_ok=True)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_cannot_be_done_is_said(
    steady: Steady, engines: EngineRoot, shared: Path, runtime: str
) -> None:
    done = ask(engines, runtime, "checkpoint", "nobody", check=False)
    assert done.returncode == 16 and "has no container nobody" in done.stderr
    container = steady(f"said-{runtime}", runtime, mib=4)
    archive = f"/mnt/shared/said-{runtime}.tar"
    ask(engines, runtime, "checkpoint", container.name, "--export", archive, "--leave-running")
    assert (shared / Path(archive).name).stat().st_mode & 0o777 == 0o600

    again = ask(engines, runtime, "checkpoint", container.name, "-e", archive, check=False)
    assert again.returncode == 3 and "exists already" in again.stderr
    taken = ask(engines, runtime, "restore", "--import", archive, check=False)
    assert f"there is a container {container.name} already" in taken.stderr
    running = ask(engines, runtime, "restore", container.name, check=False)
    assert running.returncode == 16 and "running or paused" in running.stderr

    other = "crun" if runtime == "runc" else "runc"
    wrong = ask(engines, other, "restore", "--import", archive, "--name", "other", check=False)
    assert f"was made with {runtime}, and Podman's service restores with {other}" in wrong.stderr
    container.run_on()
    (shared / Path(archive).name).unlink()


def test_an_import_that_is_refused_removes_nobody_elses_container(
    steady: Steady, engines: EngineRoot, shared: Path
) -> None:
    """Somebody makes a container of the name between the look for it and the import."""
    container = steady("raced", "runc", mib=4)
    archive = shared / "raced.tar"
    words = ("checkpoint", container.name, "-e", "/mnt/shared/raced.tar", "--leave-running")
    ask(engines, "runc", *words)
    url = start_podman(engines, "runc").removeprefix("unix://")
    made = ("podman", "create", "--name", "newcomer", IMAGE, "/bin/true")

    class Raced(Service):
        def act(self, name: str, verb: str, *words: Any) -> dict[str, Any]:
            engines.run(*made)
            return super().act(name, verb, *words)

    try:
        with Raced(f"unix://{engines.path(url)}") as service:
            options = podman.RestoreOptions(name="newcomer")
            with pytest.raises(EngineError, match="newcomer"):
                podman.restore_archive(service, archive, options)
        assert engines.run("podman", "inspect", "newcomer", check=False).returncode == 0
    finally:
        engines.run("podman", "rm", "--force", "--ignore", "newcomer")
        archive.unlink()
    container.run_on()


def test_no_service(engines: EngineRoot) -> None:
    words = ("gpustasis", "podman", "--url", "unix:///run/none.sock", "checkpoint", "x")
    done = engines.run(*words, check=False)
    assert done.returncode == 16
    assert "no Podman service answers at unix:///run/none.sock" in done.stderr
