# SPDX-License-Identifier: Apache-2.0
"""Which process serves a socket, and its end: also where its pid is another's by then."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpustasis.errors import EngineError
from gpustasis.runtimes import instance
from gpustasis.runtimes.instance import Instance, find_instance, wait
from gpustasis.task import read_task
from support.job import ended

TIMEOUT_S = 60
# It listens at argv[1] and says so; with a second word, it leaves the socket to a child and ends.
SERVER = """
import os, socket, sys, time
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
if sys.argv[2:] and os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
time.sleep(1000)
"""
# In a pid namespace of its own: two servers with the same pid, one after the other.
SAME_PID = f"""
import os, subprocess, sys, time
from gpustasis.runtimes.instance import find_instance
def start(path):
    server = subprocess.Popen([sys.executable, "-c", {SERVER!r}, path], stdout=subprocess.PIPE)
    assert server.stdout.readline()
    return server, find_instance(path)
first, old = start(sys.argv[1])
assert not old.has_ended()
first.kill(); first.wait()
os.unlink(sys.argv[1])
time.sleep(0.02)
with open("/proc/sys/kernel/ns_last_pid", "w") as last: last.write(str(first.pid - 1))
second, new = start(sys.argv[1])
print(old.pid == new.pid, old.start_time == new.start_time, old.has_ended(), new.has_ended())
second.kill(); second.wait()
"""
PID_NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc")


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("s") / "socket")


@pytest.fixture
def server(path: str) -> Iterator[subprocess.Popen[str]]:
    with serve(path) as made:
        yield made
        made.kill()


def serve(*words: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", SERVER, *words]
    made = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert made.stdout is not None and made.stdout.readline()
    return made


def test_it_is_found_and_its_end_is_seen(path: str, server: subprocess.Popen[str]) -> None:
    found = find_instance(path)
    assert isinstance(found, Instance)
    assert (found.pid, found.start_time) == (server.pid, read_task(server.pid).start_time)
    assert not found.has_ended() and not wait(0.05, found.handle)
    server.kill()
    assert wait(TIMEOUT_S, found.handle) and found.has_ended()
    found.close()


def test_nobody_is_there(path: str, server: subprocess.Popen[str]) -> None:
    assert find_instance(f"{path}-other") == (
        f"cannot connect to {path}-other: No such file or directory"
    )
    server.kill()
    server.wait()
    assert find_instance(path) == f"cannot connect to {path}: Connection refused"
    assert find_instance("/dev/null/x") == "cannot connect to /dev/null/x: Not a directory"


def test_who_has_opened_it_has_ended_and_another_serves_it(path: str) -> None:
    """The socket names a pid that may be anybody's by now."""
    left = serve(path, "leave")
    left.wait()
    found = find_instance(path)
    subprocess.run(["pkill", "-f", path], check=True)
    assert left.stdout is not None
    left.stdout.close()
    assert found == f"process {left.pid}, which has served {path}, has just ended"


def test_another_process_with_the_same_pid(path: str) -> None:
    words = (*PID_NAMESPACE, sys.executable, "-c", SAME_PID, path)
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    assert done.stdout.split() == ["True", "False", "True", "False"], done


def test_a_process_that_is_not_seen_from_here(path: str, server: subprocess.Popen[str]) -> None:
    ask = f"from gpustasis.runtimes.instance import find_instance; find_instance({path!r})"
    words = (*PID_NAMESPACE, sys.executable, "-c", ask)
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert f"the process that serves {path} is not seen from here" in done.stderr, done
    assert "hostPID" in done.stderr


def test_a_connection_tells_that_its_other_end_has_gone() -> None:
    """That the pid of a peer was still its own when it was looked at is known by this."""
    here, there = socket.socketpair()
    with here:
        assert instance._is_open(here)
        there.send(b"x")
        assert instance._is_open(here)
        here.recv(1)
        there.close()
        assert not instance._is_open(here)


def test_process_1_has_opened_it(path: str) -> None:
    ask = f"""
import os, socket
from gpustasis.runtimes.instance import find_instance
server = socket.socket(socket.AF_UNIX)
server.bind({path!r})
server.listen()
find_instance({path!r})
"""
    words = (*PID_NAMESPACE, sys.executable, "-c", ask)
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert f"process 1 has opened {path} for the runtime" in done.stderr, done


def test_a_socket_that_may_not_be_opened(path: str, server: subprocess.Popen[str]) -> None:
    Path(path).chmod(0o600)
    Path(path).parent.chmod(0o711)
    ask = f"from gpustasis.runtimes.instance import find_instance; find_instance({path!r})"
    words = ("setpriv", "--reuid=65534", "--clear-groups", "--inh-caps=-all")
    done = subprocess.run(
        [*words, sys.executable, "-c", ask], capture_output=True, text=True, check=False
    )
    assert "Permission denied" in done.stderr and EngineError.__name__ in done.stderr, done


def test_a_runtime_in_another_pid_namespace_hides_its_dumps(path: str) -> None:
    """Its criu would not be believed. In that namespace itself all is well."""
    words = [*PID_NAMESPACE, sys.executable, "-c", SERVER, path]
    with ended(subprocess.Popen(words, stdout=subprocess.PIPE)) as made:
        assert made.stdout is not None and made.stdout.readline()
        with pytest.raises(EngineError, match="is in another pid namespace"):
            instance.require_sight_of_server(path)
        (child,) = Path(f"/proc/{made.pid}/task/{made.pid}/children").read_text().split()
        enter = ["nsenter", f"--target={child}", "--pid", "--mount", sys.executable, "-c"]
        code = "import sys; from gpustasis.runtimes import instance; print('fine')"
        look = f"{code}; instance.require_sight(int(sys.argv[1]))"
        subprocess.run([*enter, look, "1"], check=True)
        os.kill(int(child), signal.SIGKILL)


def test_a_runtime_of_another_user_hides_its_dumps() -> None:
    with ended(subprocess.Popen(["sleep", "1000"], user=65534)) as made:
        # Popen returns within exec, and /proc is root's until that has come further.
        deadline = time.monotonic() + TIMEOUT_S
        while Path(f"/proc/{made.pid}").stat().st_uid != 65534:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(EngineError, match="is of user 65534"):
            instance.require_sight(made.pid)
    with ended(subprocess.Popen(["sleep", "1000"])) as made:
        instance.require_sight(made.pid)
