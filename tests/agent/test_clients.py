# SPDX-License-Identifier: Apache-2.0
"""Who may ask the agent for what; and clients that mean it harm, or are broken."""

from __future__ import annotations

import json
import os
import pwd
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gpustasis.agent.server import MAX_CONNECTIONS, MAX_LINE_BYTES, MAX_PER_USER
from gpustasis.emulator import Emulator
from support.agent import Agent, as_user, ask, say
from support.faults import await_hit
from support.job import Job

Agents = Callable[..., Agent]

NOBODY = pwd.getpwnam("nobody").pw_uid
_CAP_SYS_RESOURCE = 24  # linux/capability.h
OTHER, GROUP = 12345, 23456
# Sends lines of standard input to a socket, one after the other, and prints the answers.
ASK = """
import socket, sys
sock = socket.socket(socket.AF_UNIX); sock.connect(sys.argv[1])
answers = sock.makefile("rb")
for line in sys.stdin.buffer:
    try:
        sock.sendall(line)
    except BrokenPipeError:  # hung up on: it has said why
        pass
    sys.stdout.buffer.write(answers.readline())
"""
# Opens so many connections, holds them until all but so many are hung up on, or for a minute; says
# how many were not, and holds them.
HOLD = """
import select, socket, sys, time
held, most = [], int(sys.argv[3])
for _ in range(int(sys.argv[2])):
    sock = socket.socket(socket.AF_UNIX); sock.connect(sys.argv[1]); held.append(sock)
end = time.monotonic() + 60
while True:
    left = len(held) - len(select.select(held, [], [], 0)[0])
    if left <= most or time.monotonic() > end:
        break
    time.sleep(0.1)
print(left, flush=True)
sys.stdin.read()
"""
PYTHON = "/usr/bin/python3"


def ask_as(
    agent: Agent, uid: int, *requests: dict[str, Any], groups: Sequence[int] = ()
) -> list[dict[str, Any]]:
    lines = "".join(json.dumps({"version": 1, **one}) + "\n" for one in requests)
    words = as_user(uid, PYTHON, "-c", ASK, str(agent.socket), groups=groups)
    said = subprocess.run(
        words, input=lines, capture_output=True, text=True, timeout=60, check=False
    )
    assert said.returncode == 0, said.stderr
    return [json.loads(line) for line in said.stdout.splitlines()]


def may_read_limits_of_others() -> bool:
    """Whether this process has CAP_SYS_RESOURCE, which some containers keep from their root."""
    found = re.search(r"CapEff:\t(\w+)", Path("/proc/self/status").read_text())
    assert found is not None
    return bool(int(found[1], 16) >> _CAP_SYS_RESOURCE & 1)


def message(answer: dict[str, Any]) -> str:
    return str(answer["error"]["message"])


@pytest.fixture
def nobodys(launch: Callable[..., Job], tmp_path: Path) -> Job:
    code = "print('ready', flush=True)\nwhile True: __import__('time').sleep(0.1)"
    setpriv = Path("/usr/bin/setpriv")
    job = launch([setpriv, *as_user(NOBODY, PYTHON, "-c", code)[1:]])
    job.wait_for("ready")
    return job


def test_a_user_may_checkpoint_processes_of_their_own(agents: Agents, nobodys: Job) -> None:
    agent = agents(f"users = [{NOBODY}, {OTHER}]\n")
    checkpoint = {"do": "checkpoint", "wait": True}
    own, root_s, kernel, container = ask_as(
        agent,
        NOBODY,
        checkpoint | {"pid": nobodys.pid},
        checkpoint | {"pid": os.getpid()},
        checkpoint | {"pid": 2},
        checkpoint | {"container": "podman:x"},
    )
    assert own["operation"]["uid"] == NOBODY
    if may_read_limits_of_others():
        assert own["operation"]["state"] == "done", own
    else:  # then CRIU can dump only processes of root
        assert "Can't get rlimit 0: Operation not permitted" in own["operation"]["error"], own
    place = Path(own["operation"]["place"])
    assert place.is_relative_to(agent.store / "users" / str(NOBODY))
    assert agent.store.stat().st_mode & 0o077 == 0, "memory of processes is for root only"
    assert f"user {NOBODY} may not checkpoint process {os.getpid()}" in message(root_s)
    assert "may not checkpoint process 2" in message(kernel)
    assert "processes of their own, by pid" in message(container)
    assert nobodys.alive()
    theirs, status, show, cancel = ask_as(
        agent,
        OTHER,
        checkpoint | {"pid": nobodys.pid},
        {"do": "status"},
        {"do": "show", "id": own["operation"]["id"]},
        {"do": "cancel", "id": own["operation"]["id"]},
    )
    assert f"is of user {NOBODY}" in message(theirs)
    assert status["operations"] == [] and status["targets"] == []
    assert "there is no operation" in message(show) and "there is no operation" in message(cancel)
    with agent.client() as client:
        assert len(client.status()["operations"]) == 1


def test_all_of_the_tree_must_be_the_user_s(agents: Agents, launch: Callable[..., Job]) -> None:
    """A process of nobody's with a child of another user, as a setuid program makes one."""
    code = (
        "import os, time\n"
        "reading, writing = os.pipe()\n"
        "if os.fork() == 0:\n"
        f"    os.setresuid({OTHER}, {OTHER}, {OTHER}); os.write(writing, b'x'); time.sleep(100)\n"
        "os.read(reading, 1)\n"  # before that the child is root's
        f"os.setresgid({NOBODY}, {NOBODY}, {NOBODY}); os.setresuid({NOBODY}, {NOBODY}, {NOBODY})\n"
        "print('ready', flush=True); time.sleep(100)"
    )
    agent, job = agents(f"users = [{NOBODY}]\n"), launch([Path(sys.executable), "-c", code])
    job.wait_for("ready")
    (refused,) = ask_as(agent, NOBODY, {"do": "checkpoint", "pid": job.pid, "wait": True})
    assert f"of its tree is of user {OTHER}" in message(refused)


def test_a_process_in_a_pid_namespace_is_nobody_s_own(agents: Agents) -> None:
    agent = agents(f"users = [{NOBODY}]\n")
    inner = as_user(NOBODY, PYTHON, "-c", "print('ready', flush=True); input()")
    words = ["unshare", "--pid", "--fork", "--kill-child", *inner]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as held:
        assert held.stdin is not None and held.stdout is not None
        assert held.stdout.readline() == b"ready\n"
        pid = int(Path(f"/proc/{held.pid}/task/{held.pid}/children").read_text())
        (refused,) = ask_as(agent, NOBODY, {"do": "checkpoint", "pid": pid, "wait": True})
        held.stdin.close()
    assert "in another pid namespace" in message(refused)


def test_who_is_not_named_is_refused(agents: Agents) -> None:
    agent = agents(f"groups = [{GROUP}]\n")
    (stranger,) = ask_as(agent, OTHER, {"do": "status"})
    assert f"user {OTHER} may not use this agent" in message(stranger)
    (member,) = ask_as(agent, OTHER, {"do": "status"}, groups=[GROUP])
    assert member["operations"] == []
    closed = agents()
    words = as_user(OTHER, PYTHON, "-c", ASK, str(closed.socket))
    kept_out = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert "PermissionError" in kept_out.stderr


def test_pids_of_another_namespace_are_not_taken_for_ours(agents: Agents) -> None:
    agent = agents()
    request = json.dumps({"version": 1, "do": "checkpoint", "pid": 2, "wait": True}) + "\n"
    words = ["unshare", "--pid", "--fork", PYTHON, "-c", ASK, str(agent.socket)]
    said = subprocess.run(
        words, input=request, capture_output=True, text=True, timeout=60, check=True
    )
    assert "in another pid namespace than the agent" in message(json.loads(said.stdout))


def test_a_user_has_so_much_of_the_disk_and_the_queue(
    agents: Agents, nobodys: Job, gpu_generations: Callable[..., Job], emulator: Emulator
) -> None:
    agent = agents(f'users = [{NOBODY}]\ndisk_per_user = "1M"\nqueue_per_user = 1\n')
    request = {"do": "checkpoint", "pid": nobodys.pid, "wait": True}
    (refused,) = ask_as(agent, NOBODY, request)
    assert refused["operation"]["state"] == "refused"
    assert "and disk_per_user is 1.0 MiB" in refused["operation"]["error"]
    busy = gpu_generations()
    emulator.add_fault("checkpoint", "delay", delay_ms=6000)
    with agent.client() as client:
        id = client.checkpoint(pid=busy.pid, wait=False)["id"]
        await_hit(emulator)
        later = request | {"wait": False}
        answers = ask_as(agent, NOBODY, later, later)
        assert f"user {NOBODY} has 1 in the queue already" in message(answers[1])
        assert client.show(id, wait=True)["state"] == "done"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"", "one JSON object"),
        (b"[]", "one JSON object"),
        (b"\xff\xfe", "one JSON object"),
        (b"[" * 4000, "one JSON object"),
        (b'{"do": "status"}', "version 'None'"),
        (b'{"version": 2, "do": "status"}', "version '2'"),
        ({"do": "reboot"}, "does one of checkpoint"),
        ({"do": ["status"]}, "does one of checkpoint"),
        ({"do": "status", "more": 1}, "no key 'more'"),
        ({"do": "checkpoint"}, "name one of"),
        ({"do": "checkpoint", "pid": 2, "target": "x"}, "name one of"),
        ({"do": "checkpoint", "pid": True}, "a number from 2"),
        ({"do": "checkpoint", "pid": -1}, "a number from 2"),
        ({"do": "checkpoint", "pid": 1}, "a number from 2"),
        ({"do": "checkpoint", "pid": 1 << 70}, "a number from 2"),
        ({"do": "checkpoint", "pid": 1 << 22}, "there is no process"),
        ({"do": "checkpoint", "pid": 5, "stop": 1}, "'stop' is true or false"),
        ({"do": "checkpoint", "container": "docker:x"}, "ENGINE:NAME"),
        ({"do": "checkpoint", "container": "podman:a\nb"}, "ENGINE:NAME"),
        ({"do": "checkpoint", "target": "../../etc"}, "has no target"),
        ({"do": "show", "id": "x" * 3000}, "there is no operation"),
        ({"do": "cancel", "id": 7}, "'id' is a text"),
    ],
)
def test_what_is_no_request_is_said(
    line: bytes | dict[str, Any], said: str, module_agent: Agent
) -> None:
    """And the connection goes on."""
    bad, good = ask(module_agent.socket, line, {"do": "status"})
    assert said in message(bad)
    assert good["at_work"] == 0


def test_lines_that_are_too_long_or_never_end(module_agent: Agent) -> None:
    (answer,) = say(module_agent.socket, b"x" * (2 * MAX_LINE_BYTES)).splitlines()
    assert f"more than {MAX_LINE_BYTES} bytes" in message(json.loads(answer))
    assert say(module_agent.socket, b'{"version": 1, "do": "sta') == b""
    assert ask(module_agent.socket, {"do": "status"})[0]["at_work"] == 0


def test_a_thousand_connections_of_a_user_keep_nobody_out(agents: Agents) -> None:
    agent = agents(f"users = [{NOBODY}, {OTHER}]\n")
    words = [PYTHON, "-c", HOLD, str(agent.socket), "1000", str(MAX_PER_USER)]
    holder = subprocess.Popen(
        as_user(NOBODY, *words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None and holder.stdin is not None
        assert int(holder.stdout.readline()) <= MAX_PER_USER
        assert ask(agent.socket, {"do": "status"})[0]["at_work"] == 0
        assert ask_as(agent, OTHER, {"do": "status"})[0]["at_work"] == 0
        (refused,) = ask_as(agent, NOBODY, {"do": "status"})
        assert f"user {NOBODY} has {MAX_PER_USER} connections already" in message(refused)
        holder.stdin.close()
    assert ask_as(agent, NOBODY, {"do": "status"})[0]["at_work"] == 0


def test_root_s_connections_have_a_bound_too(agents: Agents) -> None:
    agent = agents()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    try:
        with ExitStack() as held:
            for _ in range(1000):
                sock = held.enter_context(socket.socket(socket.AF_UNIX))
                sock.connect(str(agent.socket))
            (answer,) = say(agent.socket, b"").splitlines()
            assert f"{MAX_CONNECTIONS} connections already" in message(json.loads(answer))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    deadline = time.monotonic() + 30
    while "error" in ask(agent.socket, {"do": "status"})[0]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
