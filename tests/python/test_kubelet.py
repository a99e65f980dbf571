# SPDX-License-Identifier: Apache-2.0
"""The kubelet's client against a TLS server that answers as a kubelet does, and as none should."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from gpustasis.errors import EngineError
from gpustasis.runtimes.kubelet import Access, check, checkpoint, parse_target, read_token
from support.certificates import Authority
from support.kubelet_server import ALLOWED, Kubelet, KubeletServer, RuntimeFault

PODS = {("default", "web"): {"app"}}
ARCHIVE = "/var/lib/kubelet/checkpoints/checkpoint-web_default-app-2026-01-01T00:00:00Z.tar"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def access(authority: Authority) -> Access:
    admin = authority.client(ALLOWED)
    return Access(ca=authority.certificate, certificate=admin.certificate, key=admin.key)


Serve = Callable[[Kubelet], str]


@pytest.fixture
def serve(authority: Authority) -> Iterator[Serve]:
    """serve(kubelet) -> its address."""
    with ExitStack() as stack:

        def start(kubelet: Kubelet) -> str:
            pair = authority.server("127.0.0.1")
            server = KubeletServer(kubelet, pair.certificate, pair.key, authority.certificate)
            return f"127.0.0.1:{stack.enter_context(server).port}"

        yield start


def kubelet(answer: str | Exception = ARCHIVE, **settings: object) -> Kubelet:
    """One that has PODS; `answer`: the archive it makes, or how that fails."""

    def make(namespace: str, pod: str, container: str, timeout: int) -> str:
        if isinstance(answer, Exception):
            raise answer
        return answer.replace("TIMEOUT", str(timeout))

    return Kubelet(pods=lambda: PODS, checkpoint=make, **settings)  # type: ignore[arg-type]


def error(access: Access, target: str, node: str, timeout_s: int = 30) -> str:
    with pytest.raises(EngineError) as caught:
        checkpoint(access, parse_target(target, node), timeout_s)
    return str(caught.value)


def test_the_archives_path_and_the_timeout(access: Access, serve: Serve) -> None:
    node = serve(kubelet("/checkpoints/TIMEOUT.tar"))
    made = checkpoint(access, parse_target("default/web/app", node), 77)
    assert made.archives == ("/checkpoints/77.tar",)


def test_an_api_servers_proxy(access: Access, serve: Serve) -> None:
    """It is asked for the node by name; a kubelet itself knows no such path."""

    class Proxy(Kubelet):
        def answer(self, user: str | None, path: str) -> tuple[int, str, str]:
            assert path.startswith("/api/v1/nodes/node-1/proxy/checkpoint/default/web/app?")
            return super().answer(user, path.removeprefix("/api/v1/nodes/node-1/proxy"))

    plain = kubelet()
    address = serve(Proxy(pods=plain.pods, checkpoint=plain.checkpoint))
    through = replace(access, api_server=f"https://{address}")
    assert checkpoint(through, parse_target("default/web/app", "node-1")).archives == (ARCHIVE,)


@pytest.mark.parametrize(
    ("target", "said", "explained"),
    [
        ("default/none/app", "pod does not exist", "is the node right"),
        ("default/web/none", "container none does not exist", "no such container"),
    ],
)
def test_what_is_not_there(
    access: Access, serve: Serve, target: str, said: str, explained: str
) -> None:
    message = error(access, target, serve(kubelet()))
    assert f"{target} on 127.0.0.1" in message
    assert f'"{said}" (404)' in message and explained in message


def test_the_gate_is_off(access: Access, serve: Serve) -> None:
    message = error(access, "default/web/app", serve(kubelet(gate=False)))
    assert "feature gate ContainerCheckpoint is off" in message


@pytest.mark.parametrize(
    ("fault", "explained"),
    [
        ("rpc error: code = Unknown desc = criu failed", "criu's log is in the runtime's state"),
        (
            "rpc error: code = Unimplemented desc = method CheckpointContainer not implemented",
            "containerd can from 2.0 on",
        ),
        (
            "rpc error: code = DeadlineExceeded desc = context deadline exceeded",
            "gpustasis containerd resume default/web/app",
        ),
    ],
)
def test_the_runtime_fails(access: Access, serve: Serve, fault: str, explained: str) -> None:
    message = error(access, "default/web/app", serve(kubelet(RuntimeFault(fault))))
    assert f"checkpointing of default/web/app failed ({fault})" in message
    assert explained in message


def test_who_is_let_in(access: Access, authority: Authority, serve: Serve) -> None:
    node = serve(kubelet(tokens={"good": ALLOWED, "weak": "guest"}))
    nobody = replace(access, certificate=None, key=None)
    assert checkpoint(replace(nobody, token="good"), parse_target("default/web/app", node))
    assert '"Unauthorized" (401): the token is not accepted' in error(
        replace(nobody, token="old"), "default/web/app", node
    )
    forbidden = error(replace(nobody, token="weak"), "default/web/app", node)
    assert "user=guest" in forbidden and "verb create on nodes/checkpoint" in forbidden
    older = serve(kubelet(older=True, tokens={"weak": "guest"}))
    forbidden = error(replace(nobody, token="weak"), "default/web/app", older)
    assert "subresource=checkpoint)" in forbidden
    assert "RBAC must allow this user the verb create on nodes/checkpoint" in forbidden
    guest = authority.client("visitor")
    forbidden = error(
        replace(access, certificate=guest.certificate, key=guest.key), "default/web/app", node
    )
    assert "user=visitor" in forbidden


KUBELETS_OWN = "Forbidden (user=api (x), verb=create, resource=nodes, subresource"


@pytest.mark.parametrize(
    ("body", "direct", "through"),
    [
        (
            f"{KUBELETS_OWN}=proxy)",
            "the kubelet refuses: RBAC must allow this user the verb create on nodes/proxy",
            (
                "the kubelet refuses: RBAC must allow api (x), as whom the API server asks "
                "kubelets, the verb create on nodes/proxy"
            ),
        ),
        (
            f"{KUBELETS_OWN}(s)=[checkpoint proxy])",
            "this user the verb create on nodes/checkpoint or nodes/proxy",
            "kubelets, the verb create on nodes/checkpoint or nodes/proxy",
        ),
        (
            json.dumps(
                {
                    "kind": "Status",
                    "message": 'nodes "n" is forbidden: User "me" cannot create resource '
                    '"nodes/proxy" in API group "" at the cluster scope',
                }
            ),
            "RBAC must allow this user the verb create on nodes/proxy",
            "(403): RBAC must allow this user the verb create on nodes/proxy",
        ),
        (
            "no",
            "verb create on nodes/checkpoint (older kubelets: nodes/proxy)",
            "(403): RBAC must allow this user the verb create on nodes/proxy",
        ),
    ],
    ids=["older kubelet", "newer kubelet", "API server", "neither"],
)
def test_who_must_be_allowed_what(
    access: Access, serve: Serve, body: str, direct: str, through: str
) -> None:
    class Forbidding(Kubelet):
        def answer(self, user: str | None, path: str) -> tuple[int, str, str]:
            return 403, "text/plain", body

    node = serve(Forbidding(pods=lambda: PODS, checkpoint=lambda *words: ARCHIVE))
    assert error(access, "default/web/app", node).endswith(direct)
    proxied = replace(access, api_server=f"https://{node}")
    assert error(proxied, "default/web/app", "node-1").endswith(through)


def test_the_server_must_be_trusted(
    access: Access, authority: Authority, serve: Serve, tmp_path: Path
) -> None:
    """By its CA and by its address; nothing is asked of it before, and no token is sent."""
    asked = []

    def checkpoint_made(*words: object) -> str:
        asked.append(words)
        return ARCHIVE

    node = serve(Kubelet(pods=lambda: PODS, checkpoint=checkpoint_made))
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other", "other-ca")
    message = error(replace(access, ca=other.certificate), "default/web/app", node)
    assert "certificate is not to be trusted" in message and str(other.certificate) in message
    elsewhere = authority.server("127.0.0.9")
    with KubeletServer(
        Kubelet(pods=lambda: PODS, checkpoint=checkpoint_made),
        *(elsewhere.certificate, elsewhere.key, authority.certificate),
    ) as server:
        message = error(access, "default/web/app", f"127.0.0.1:{server.port}")
    assert "certificate is not to be trusted" in message
    assert asked == []


def test_an_unknown_clients_certificate(access: Access, serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other", "other-ca").client(ALLOWED)
    strange = replace(access, certificate=stranger.certificate, key=stranger.key)
    message = error(strange, "default/web/app", serve(kubelet()))
    assert "TLS" in message or "connection broke" in message


@pytest.mark.parametrize(
    ("status", "body", "explained"),
    [
        (200, "", "names no archive"),
        (200, '{"items": "x"}', "names its archives as"),
        (200, "[" * 100_000, "names no archive"),
        (200, '{"other": []}', "names no archive"),
        (302, "", "redirects are not followed"),
        (503, "a\x1b[31mlarm", 'a?[31mlarm" (503)'),
        (404, '{"kind": "Status", "message": "nodes \\"n\\" not found"}', "knows no such node"),
    ],
)
def test_answers_that_no_kubelet_gives(
    access: Access, serve: Serve, status: int, body: str, explained: str
) -> None:
    class Odd(Kubelet):
        def answer(self, user: str | None, path: str) -> tuple[int, str, str]:
            return status, "text/plain", body

    plain = kubelet()
    node = serve(Odd(pods=plain.pods, checkpoint=plain.checkpoint))
    assert explained in error(access, "default/web/app", node)


def test_nobody_listens(access: Access) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert "cannot connect" in error(access, "default/web/app", f"127.0.0.1:{port}")


def test_no_answer(access: Access, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpustasis.runtimes.kubelet._GRACE_S", 0.2)
    released = threading.Event()

    def never(*words: object) -> str:
        released.wait(60)
        return ARCHIVE

    node = serve(Kubelet(pods=lambda: PODS, checkpoint=never))
    try:
        message = error(access, "default/web/app", node, timeout_s=1)
    finally:
        released.set()
    assert "no answer in 1 s" in message and "may still be made" in message


@pytest.mark.parametrize(
    ("text", "node", "explained"),
    [
        ("web/app", "n", "is no NAMESPACE/POD/CONTAINER"),
        ("a/b/c/d", "n", "is no NAMESPACE/POD/CONTAINER"),
        ("default/../app", "n", "'..' is no name of Kubernetes"),
        ("default/web/app?x=y", "n", "is no name of Kubernetes"),
        ("default/web/app", None, "on which node"),
        ("default/web/app@a/b", None, "is no address of a node"),
    ],
)
def test_names_that_are_none(text: str, node: str | None, explained: str) -> None:
    with pytest.raises(EngineError) as caught:
        parse_target(text, node)
    assert explained in str(caught.value)


def test_credentials_that_are_none(access: Access, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(EngineError, match="holds no bearer token"):
        read_token(empty)
    (tmp_path / "two").write_text("two words\n")
    with pytest.raises(EngineError, match="holds no bearer token"):
        read_token(tmp_path / "two")
    with pytest.raises(EngineError, match="holds no certificate or key in PEM"):
        check(replace(access, ca=empty))
    with pytest.raises(EngineError, match="needs a certificate"):
        check(replace(access, certificate=None))
    with pytest.raises(EngineError, match="is no API server's URL"):
        check(replace(access, api_server="http://node"))


def test_the_servers_body_is_valid_json(access: Access, serve: Serve) -> None:
    """That of support.kubelet_server, which stands for the kubelet's."""
    status, kind, body = kubelet().answer(ALLOWED, "/checkpoint/default/web/app")
    assert (status, kind, json.loads(body)) == (200, "application/json", {"items": [ARCHIVE]})


def test_an_interrupt_begins_no_more(access: Access, serve: Serve) -> None:
    """What is under way is waited for: the node would go on with it anyway."""
    begun, released = threading.Event(), threading.Event()

    def slow(*words: object) -> str:
        begun.set()
        released.wait(60)
        return ARCHIVE

    node = serve(Kubelet(pods=lambda: {("default", "web"): {"a", "b"}}, checkpoint=slow))
    command = subprocess.Popen(
        [
            *(sys.executable, "-m", "gpustasis", "kubelet", "checkpoint", "--node", node),
            *("--ca", str(access.ca), "--cert", str(access.certificate), "--key", str(access.key)),
            *("--parallel", "1", "--json", "default/web/a", "default/web/b"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert begun.wait(60)
        command.send_signal(signal.SIGINT)
        assert command.stderr is not None
        assert command.stderr.readline() == "no more are begun; waiting for those under way\n"
        released.set()
        said, errors = command.communicate(timeout=60)
    finally:
        released.set()
        command.kill()
        command.communicate()
    assert command.returncode == 16
    assert [result["ok"] for result in json.loads(said)["checkpoints"]] == [True, False]
    assert "default/web/b on 127.0.0.1" in errors and "not begun" in errors
