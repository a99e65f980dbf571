# SPDX-License-Identifier: Apache-2.0
"""The kubelet's client: what it does with answers that no real kubelet, and no real API server, can
be made to give. With those that they give: tests/kubernetes/test_checkpoint.py, test_access.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpustasis.errors import EngineError
from gpustasis.runtimes import freezer
from gpustasis.runtimes.kubelet import Access, check, checkpoint, parse_target, read_token
from support.certificates import Authority
from support.kubelet_server import Answer, KubeletServer
from support.ports import hold_port, port_of

ARCHIVE = "/var/lib/kubelet/checkpoints/checkpoint-web_default-app-2026-01-01T00:00:00Z.tar"
MADE = (200, f'{{"items":["{ARCHIVE}"]}}')


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def access(authority: Authority) -> Access:
    return Access(ca=authority.certificate, token="a-token")


Serve = Callable[[Answer], str]


@pytest.fixture
def serve(authority: Authority) -> Iterator[Serve]:
    """serve(answer) -> the address of a server that gives it."""
    with ExitStack() as stack:
        yield (
            lambda answer: (
                stack.enter_context(KubeletServer(answer, authority.server("127.0.0.1"))).address
            )
        )


def error(access: Access, target: str, node: str, timeout_s: int = 30) -> str:
    with pytest.raises(EngineError) as caught:
        checkpoint(access, parse_target(target, node), timeout_s)
    return str(caught.value)


def test_an_api_server_below_a_path(access: Access, serve: Serve) -> None:
    """As those that manage many clusters have it. kube-apiserver itself is at the root of its
    URL."""
    asked = []

    def answer(path: str) -> tuple[int, str]:
        asked.append(path)
        return MADE

    through = replace(access, api_server=f"https://{serve(answer)}/clusters/one")
    made = checkpoint(through, parse_target("default/web/app", "node-1"), 77)
    assert made.archives == (ARCHIVE,)
    path = "/clusters/one/api/v1/nodes/node-1/proxy/checkpoint/default/web/app"
    assert asked == [f"{path}?timeout=77"]


def test_a_runtime_without_checkpoints(access: Access, serve: Serve) -> None:
    """The words of containerd 1.7: those under a real kubelet here can checkpoint."""
    fault = "rpc error: code = Unimplemented desc = method CheckpointContainer not implemented"
    said = f"checkpointing of default/web/app failed ({fault})"
    message = error(access, "default/web/app", serve(lambda path: (500, said)))
    assert said in message and "containerd can from 2.0 on" in message


@pytest.mark.parametrize("refused", [1, 4])
def test_a_container_that_was_not_frozen(
    access: Access, serve: Serve, refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words of containerd 2.1 with runc 1.3 on a busy node with cgroup v1. Only the pauses take
    time here: an answer is as late as the machine is busy."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(freezer, "time", clock)
    fault = (
        'rpc error: code = Unknown desc = checkpointing container "d6f80c1a" failed: OCI runtime '
        "pause failed: unable to freeze"
    )
    asked: list[int] = []

    def answer(path: str) -> tuple[int, str]:
        asked.append(int(path.partition("timeout=")[2]))
        if len(asked) <= refused:
            return 500, f"checkpointing of default/web/app failed ({fault})"
        return MADE

    target = parse_target("default/web/app", serve(answer))
    if refused == 1:
        assert checkpoint(access, target, 30).archives == (ARCHIVE,)
        assert len(asked) == 2 and asked[0] == 30 and asked[1] in range(20, 30)
    else:
        with pytest.raises(EngineError, match=r"unable to freeze.*asked up to 4 times"):
            checkpoint(access, target, 30)
        assert len(asked) == 4
        asked.clear()
        with pytest.raises(EngineError, match="unable to freeze"):
            checkpoint(access, target, 2)  # no time for a third one
        assert asked == [2, 1]


def test_what_was_cut_off_is_not_asked_for_again(access: Access, serve: Serve) -> None:
    """Whatever its text holds besides: names that a workload has chosen, say."""
    asked: list[str] = []
    fault = "rpc error: code = DeadlineExceeded desc = unable to freeze"

    def answer(path: str) -> tuple[int, str]:
        asked.append(path)
        return 500, f"checkpointing of default/web/app failed ({fault})"

    message = error(access, "default/web/app", serve(answer))
    assert "may have left the container paused" in message
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("fault", "paused"),
    [
        (
            'failed to checkpoint container 5e87: running "/usr/bin/crun" ["checkpoint" "5e87"]',
            True,
        ),
        (
            'failed to checkpoint container 5e87: running "/usr/bin/runc" ["checkpoint" "5e87"]',
            False,
        ),
        ("failed to write file system changes of container 5e87: no space left on device", True),
        ("timeout of 10s reached waiting for the cgroup to freeze", True),
        ('checkpointing container "5e87" failed: criu failed', False),
    ],
)
def test_one_that_may_be_left_paused(
    access: Access, serve: Serve, fault: str, paused: bool
) -> None:
    """The words of CRI-O 1.36, containerd 2.1 and runc 1.3."""
    said = f"checkpointing of default/web/app failed ({fault})"
    message = error(access, "default/web/app", serve(lambda path: (500, said)))
    assert ("gpustasis crio resume default/web/app" in message) == paused
    assert ("the container runs on" in message) != paused
    assert ("criu's log is" in message) != paused and (
        "If criu was started, its log" in message
    ) == paused


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
            f"{KUBELETS_OWN}=checkpoint)",
            "RBAC must allow this user the verb create on nodes/checkpoint",
            "asks kubelets, the verb create on nodes/checkpoint",
        ),
        (
            f"{KUBELETS_OWN}(s)=[checkpoint proxy])",
            "this user the verb create on nodes/checkpoint or nodes/proxy",
            "kubelets, the verb create on nodes/checkpoint or nodes/proxy",
        ),
        (
            "no",
            "verb create on nodes/checkpoint (older kubelets: nodes/proxy)",
            "(403): RBAC must allow this user the verb create on nodes/proxy",
        ),
    ],
    ids=["before nodes/checkpoint", "before 1.32", "newer", "neither"],
)
def test_who_must_be_allowed_what(
    access: Access, serve: Serve, body: str, direct: str, through: str
) -> None:
    """The words of other versions than the one that is real here, and of nobody."""
    node = serve(lambda path: (403, body))
    assert error(access, "default/web/app", node).endswith(direct)
    proxied = replace(access, api_server=f"https://{node}")
    assert error(proxied, "default/web/app", "node-1").endswith(through)


def test_the_server_must_be_trusted(
    access: Access, authority: Authority, serve: Serve, tmp_path: Path
) -> None:
    """By its CA and by its address; nothing is asked of it before, and no token is sent. A real
    kubelet does not tell what it was not asked."""
    asked = []

    def answer(path: str) -> tuple[int, str]:
        asked.append(path)
        return MADE

    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other", "other-ca")
    message = error(replace(access, ca=other.certificate), "default/web/app", serve(answer))
    assert "certificate is not to be trusted" in message and str(other.certificate) in message
    with KubeletServer(answer, authority.server("127.0.0.9")) as elsewhere:
        message = error(access, "default/web/app", elsewhere.address)
    assert "certificate is not to be trusted" in message
    assert asked == []


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
    assert explained in error(access, "default/web/app", serve(lambda path: (status, body)))


def test_nobody_listens(access: Access) -> None:
    with hold_port() as held:  # nobody else's meanwhile
        address = f"127.0.0.1:{port_of(held)}"
        assert "cannot connect" in error(access, "default/web/app", address)


def test_no_answer(access: Access, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real kubelet answers when the runtime's time is over."""
    monkeypatch.setattr("gpustasis.runtimes.kubelet._GRACE_S", 0.2)
    released = threading.Event()

    def never(path: str) -> tuple[int, str]:
        released.wait(60)
        return MADE

    try:
        message = error(access, "default/web/app", serve(never), timeout_s=3)
    finally:
        released.set()
    assert "no answer in 3 s" in message and "may still be made" in message


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
        check(replace(access, key=empty))
    with pytest.raises(EngineError, match="is no API server's URL"):
        check(replace(access, api_server="http://node"))
