# SPDX-License-Identifier: Apache-2.0
"""Kubeconfig files as kubectl reads them: which server they mean, and how to be let in there. Real
ones are asked in tests/kubernetes/test_kubeconfig.py."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpustasis.errors import EngineError
from gpustasis.runtimes.kubeconfig import default_paths, open_access
from gpustasis.runtimes.kubelet import check
from support.certificates import Authority, Pair

SERVER = "https://127.0.0.1:6443/clusters/one"
TARGET = "default/web/app@node-1"
TOKEN = "s3cret.token"
Config = dict[str, Any]
Ask = Callable[..., "Shown"]
Show = Callable[..., "Shown"]


@dataclass(frozen=True)
class Shown:
    """What a server would be shown: a token, or the content of a certificate and a key."""

    token: str | None = None
    certificate: bytes | None = None
    key: bytes | None = None


BY_TOKEN = Shown(token=TOKEN)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def admin(authority: Authority) -> Pair:
    return authority.client("admin")


@pytest.fixture
def by_certificate(admin: Pair) -> Shown:
    return Shown(None, admin.certificate.read_bytes(), admin.key.read_bytes())


def encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


@pytest.fixture
def config(authority: Authority) -> Config:
    """Everything but the user."""
    cluster = {"server": SERVER, "certificate-authority-data": encoded(authority.certificate)}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "preferences": {},
        "contexts": [
            {"name": "elsewhere", "context": {"cluster": "gone", "user": "nobody"}},
            {"name": "here", "context": {"cluster": "one", "user": "me", "namespace": "x"}},
        ],
        "clusters": [{"name": "one", "cluster": cluster}],
        "users": [{"name": "me", "user": {}}],
    }


@pytest.fixture
def show(authority: Authority) -> Show:
    """show(paths, context=None): what the server of these files would be shown. Fails if that is
    not SERVER, or is known by another CA."""

    def call(paths: list[Path], context: str | None = None) -> Shown:
        with open_access(paths, context) as access:
            check(access)
            assert access.api_server == SERVER
            assert access.ca.read_bytes() == authority.certificate.read_bytes()
            pair = (access.certificate, access.key)
            return Shown(access.token, *(path.read_bytes() if path else None for path in pair))

    return call


@pytest.fixture
def ask(tmp_path: Path, config: Config, show: Show) -> Ask:
    """ask(user, context=None): what its server would be shown."""

    def call(user: Config, context: str | None = None) -> Shown:
        config["users"][0]["user"] = user
        path = tmp_path / "config"
        path.write_text(yaml.safe_dump(config))
        return show([path], context)

    return call


def test_certificates_in_the_file(ask: Ask, admin: Pair, by_certificate: Shown) -> None:
    user = {
        "client-certificate-data": encoded(admin.certificate),
        "client-key-data": encoded(admin.key),
    }
    assert ask(user) == by_certificate
    assert ask(user, "here") == by_certificate


def test_certificates_beside_the_file(
    tmp_path: Path, ask: Ask, admin: Pair, by_certificate: Shown
) -> None:
    (tmp_path / "me.crt").write_bytes(admin.certificate.read_bytes())
    (tmp_path / "me.key").write_bytes(admin.key.read_bytes())
    assert ask({"client-certificate": "me.crt", "client-key": "me.key"}) == by_certificate
    # What stands in the file is taken first.
    data = {"client-certificate-data": encoded(admin.certificate), "client-certificate": "gone"}
    assert ask(data | {"client-key": "me.key"}) == by_certificate


def test_tokens(tmp_path: Path, ask: Ask) -> None:
    assert ask({"token": TOKEN, "unknown-field": [1]}) == BY_TOKEN
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert ask({"tokenFile": "token", "token": "an older one"}) == BY_TOKEN


PLUGIN = """#!/bin/sh
echo "a warning" >&2
cat >"$(dirname "$0")/seen" <<END
$KUBERNETES_EXEC_INFO
END
echo "$1 $COLOUR" >>"$(dirname "$0")/seen"
cat "$(dirname "$0")/answer"
"""


def plugin(tmp_path: Path, status: Config, **fields: object) -> Config:
    """A user with an exec plugin that answers with this status."""
    program = tmp_path / "plugin"
    program.write_text(PLUGIN)
    program.chmod(0o755)
    version = "client.authentication.k8s.io/v1"
    answer = {"apiVersion": version, "kind": "ExecCredential", "status": status}
    (tmp_path / "answer").write_text(json.dumps(answer))
    words = {"command": "./plugin", "args": ["get"], "env": [{"name": "COLOUR", "value": "red"}]}
    return {"exec": {"apiVersion": version, "interactiveMode": "IfAvailable"} | words | fields}


def test_an_exec_plugin_gives_a_token(tmp_path: Path, ask: Ask) -> None:
    assert ask(plugin(tmp_path, {"token": TOKEN}, provideClusterInfo=True)) == BY_TOKEN
    info, words = (tmp_path / "seen").read_text().splitlines()
    assert words == "get red"
    assert json.loads(info)["kind"] == "ExecCredential"
    assert json.loads(info)["spec"]["interactive"] is False
    assert json.loads(info)["spec"]["cluster"]["server"] == SERVER


def test_an_exec_plugin_gives_a_certificate(
    tmp_path: Path, ask: Ask, admin: Pair, by_certificate: Shown
) -> None:
    status = {
        "clientCertificateData": admin.certificate.read_text(),
        "clientKeyData": admin.key.read_text(),
    }
    assert ask(plugin(tmp_path, status)) == by_certificate


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"apiVersion": "client.authentication.k8s.io/v2"}, "apiVersion"),
        ({"interactiveMode": "Always"}, "would ask a person"),
        ({"command": "no-such-program", "installHint": "get it"}, "cannot run.*; get it"),
        ({"command": "false"}, r"failed \(exit 1\)"),
        ({"command": "echo", "args": ["no JSON"]}, "prints no ExecCredential"),
    ],
)
def test_an_exec_plugin_that_does_not_work(
    tmp_path: Path, ask: Ask, fields: Config, what: str
) -> None:
    with pytest.raises(EngineError, match=what):
        ask(plugin(tmp_path, {"token": TOKEN}, **fields))


@pytest.mark.parametrize(
    ("cluster", "user", "what"),
    [
        ({"insecure-skip-tls-verify": True}, {}, "insecure-skip-tls-verify cannot be used"),
        ({"proxy-url": "http://proxy"}, {}, "proxy-url cannot be used"),
        ({"tls-server-name": "x"}, {}, "tls-server-name cannot be used"),
        ({"certificate-authority-data": "!"}, {}, "is no base64"),
        ({"server": ""}, {}, "has no server"),
        ({"server": "http://127.0.0.1"}, {}, "is no API server's URL"),
        ({"server": 7}, {}, "server is no text"),
        ({}, {"as": "somebody"}, "as cannot be used"),
        ({}, {"username": "x", "password": "y"}, "username cannot be used"),
        ({}, {"auth-provider": {"name": "x"}}, "auth-provider cannot be used"),
        ({}, {"token": None}, "the user has no token"),
        ({}, {"token": None, "client-certificate": "x"}, "go together"),
    ],
)
def test_what_cannot_be_done_as_kubectl_does_it_is_refused(
    ask: Ask, config: Config, cluster: Config, user: Config, what: str
) -> None:
    config["clusters"][0]["cluster"] |= cluster
    with pytest.raises(EngineError, match=what):
        ask({"token": TOKEN} | user)


BAD_PATHS = pytest.mark.parametrize("bad", ["a\0b", "a\ud800b"], ids=["NUL", "surrogate"])


@BAD_PATHS
@pytest.mark.parametrize(
    ("section", "field"),
    [
        ("cluster", "certificate-authority"),
        ("user", "client-certificate"),
        ("user", "tokenFile"),
    ],
)
def test_what_can_be_no_path(ask: Ask, config: Config, section: str, field: str, bad: str) -> None:
    user: Config = {"token": TOKEN}
    if section == "user":
        user |= {field: bad, "client-key": bad if field == "client-certificate" else ""}
    else:
        del config["clusters"][0]["cluster"]["certificate-authority-data"]
        config["clusters"][0]["cluster"][field] = bad
    with pytest.raises(EngineError, match="cannot read"):
        ask(user)


@BAD_PATHS
def test_an_exec_plugin_whose_words_can_be_none(tmp_path: Path, ask: Ask, bad: str) -> None:
    with pytest.raises(EngineError, match="cannot run"):
        ask(plugin(tmp_path, {"token": TOKEN}, command=bad))
    certificate = {"clientCertificateData": bad, "clientKeyData": bad}
    with pytest.raises(EngineError, match="holds no certificate"):
        ask(plugin(tmp_path, certificate))


@pytest.mark.parametrize("token", ["k\u00e9y", "two words", "a\nb", "\ud800", "a\0"])
def test_what_can_be_no_token(tmp_path: Path, ask: Ask, token: str) -> None:
    with pytest.raises(EngineError, match="is not one word of printable ASCII"):
        ask({"token": token})
    with pytest.raises(EngineError, match="is not one word of printable ASCII"):
        ask(plugin(tmp_path, {"token": token}))


def test_contexts_that_are_not_there(ask: Ask, config: Config) -> None:
    with pytest.raises(EngineError, match="has no context 'none'"):
        ask({"token": TOKEN}, "none")
    with pytest.raises(EngineError, match="has no cluster 'gone'"):
        ask({"token": TOKEN}, "elsewhere")
    config["contexts"][0]["context"] = {"user": "me"}
    config["clusters"].append({**config["clusters"][0], "name": "elsewhere"})
    with pytest.raises(EngineError, match="context 'elsewhere' has no cluster"):
        ask({"token": TOKEN}, "elsewhere")
    del config["current-context"]
    with pytest.raises(EngineError, match="name one with --context"):
        ask({"token": TOKEN})


@pytest.mark.parametrize(
    "raw",
    [
        *("", "[]", "a: [", "\x00", "contexts: 7"),
        *("a: !!timestamp x", "a: !!int ''", "a: !!bool maybe", "a: !!float ''", "? {b: c}\n: d"),
    ],
)
def test_what_is_no_kubeconfig(tmp_path: Path, raw: str) -> None:
    (tmp_path / "config").write_text(raw)
    with pytest.raises(EngineError), open_access([tmp_path / "config"], "x"):
        pass


def test_the_files_that_kubectl_reads() -> None:
    assert default_paths({"KUBECONFIG": "/a"}) == (Path("/a"),)
    assert default_paths({"KUBECONFIG": ":/a::/b:"}) == (Path("/a"), Path("/b"))
    assert default_paths({"HOME": "/home/me"}) == (Path("/home/me/.kube/config"),)


class TestSeveralFiles:
    """As kubectl merges them: "the first file to set a particular value or map key wins"."""

    @pytest.fixture
    def split(self, tmp_path: Path, config: Config) -> list[Path]:
        """Context and user in the one, the cluster in the other; certificates beside it."""
        (tmp_path / "one").mkdir()
        (tmp_path / "two").mkdir()
        user = {"name": "me", "user": {"tokenFile": "token"}}
        (tmp_path / "one" / "token").write_text(TOKEN)
        one = {"contexts": config["contexts"], "users": [user]}
        cluster = dict(config["clusters"][0]["cluster"])
        data = base64.b64decode(cluster.pop("certificate-authority-data"))
        (tmp_path / "two" / "ca.crt").write_bytes(data)
        cluster["certificate-authority"] = "ca.crt"
        two = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "gone"}}],
            "clusters": [{"name": "one", "cluster": cluster}],
            "users": [{"name": "me", "user": {"token": "of another", "as": "somebody"}}],
        }
        paths = [tmp_path / "one" / "config", tmp_path / "two" / "config"]
        for path, content in zip(paths, (one, two), strict=True):
            path.write_text(yaml.safe_dump(content))
        return paths

    def test_each_part_comes_from_the_first_that_has_it(
        self, split: list[Path], show: Show
    ) -> None:
        assert show(split) == BY_TOKEN
        assert show(split, "here") == BY_TOKEN

    def test_one_that_is_not_there_means_nothing(
        self, tmp_path: Path, split: list[Path], show: Show
    ) -> None:
        assert show([tmp_path / "gone", *split]) == BY_TOKEN
        with pytest.raises(EngineError, match="cannot read"):
            show([tmp_path / "gone", tmp_path / "too"])

    def test_one_whose_directory_is_a_file_is_an_error(
        self, tmp_path: Path, split: list[Path], show: Show
    ) -> None:
        """To kubectl too: only ENOENT means that a file is not there."""
        (tmp_path / "file").touch()
        with pytest.raises(EngineError, match=r"cannot read .*file/config: Not a directory"):
            show([tmp_path / "file" / "config", *split])

    @pytest.mark.parametrize("content", ["", "# nothing yet\n", "---\n"])
    def test_one_that_is_empty_means_nothing(
        self, tmp_path: Path, split: list[Path], show: Show, content: str
    ) -> None:
        (tmp_path / "empty").write_text(content)
        assert show([tmp_path / "empty", *split]) == BY_TOKEN
        with pytest.raises(EngineError, match="empty has no context 'x'"):
            show([tmp_path / "empty"], "x")

    def test_one_that_may_not_be_read_is_an_error(
        self, tmp_path: Path, split: list[Path], show: Show
    ) -> None:
        """It may say what the others do not: which of them counts is not known then."""
        closed = tmp_path / "closed"
        closed.mkdir(mode=0)
        os.seteuid(65534)
        try:
            with pytest.raises(
                EngineError, match=r"cannot read .*closed/config: Permission denied"
            ):
                show([closed / "config", *split])
        finally:
            os.seteuid(0)

    @pytest.mark.parametrize("name", ["x" * 300, "."])
    def test_one_that_cannot_be_read(
        self, tmp_path: Path, split: list[Path], monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        paths = [tmp_path / name, *split]
        monkeypatch.setenv("KUBECONFIG", ":".join(map(str, paths)))
        words = ["kubelet", "checkpoint", TARGET, "--context", "here"]
        argv = [sys.executable, "-m", "gpustasis", *words]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == EngineError.exit_code, done.stderr
        assert f"gpustasis: cannot read {paths[0]}: " in done.stderr

    def test_an_entry_of_the_first_is_taken_whole(self, split: list[Path], show: Show) -> None:
        with pytest.raises(EngineError, match="have no cluster 'gone'"):
            show(split[::-1])

    def test_one_that_is_damaged_is_refused(self, split: list[Path], show: Show) -> None:
        split[1].write_text("a: [")
        with pytest.raises(EngineError, match="two/config is no kubeconfig"):
            show(split)


def test_the_command_wants_no_other_server_beside_it(tmp_path: Path, ask: Ask) -> None:
    ask({"token": TOKEN})
    words = ["kubelet", "checkpoint", TARGET, "--kubeconfig", tmp_path / "config"]
    argv = [sys.executable, "-m", "gpustasis", *words, "--ca", tmp_path / "config"]
    both = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert both.returncode == 2 and "leave out" in both.stderr
