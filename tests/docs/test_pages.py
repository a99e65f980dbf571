# SPDX-License-Identifier: Apache-2.0
"""Links of README.md and docs lead to pages and headings that are there; two tables of one list
agree; commands that only some readers need work."""

from __future__ import annotations

import re
import subprocess
import textwrap
from pathlib import Path

import pytest
import yaml

from support.kubernetes_objects import pod_of

_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_ROOT = Path(__file__).resolve().parents[2]
_PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (_ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = _HEADING.findall(_FENCED.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def first_cells(page: Path, head: str) -> list[str]:
    """Of the table that begins with `head`, without its two first rows."""
    table = page.read_text().split(head)[1].split("\n\n")[0]
    return [row.split("|")[1].strip() for row in table.splitlines()[2:]]


@pytest.mark.parametrize("name", _PAGES)
def test_links_lead_somewhere(repository: Path, name: str) -> None:
    page = repository / name
    for link in _LINK.findall(page.read_text()):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_links_with_anchors_are_looked_at() -> None:
    links = _LINK.findall((_ROOT / "README.md").read_text())
    assert sum("#" in link and "://" not in link for link in links) >= 5


def test_it_is_said_of_each_condition_how_it_was_tested(repository: Path) -> None:
    known = first_cells(repository / "docs/operating.md", "| condition | what follows from it |")
    tested = first_cells(repository / "docs/doctor-tests.md", "| condition | tested |")
    assert len(known) > 30
    assert tested == known


def test_the_manifest_for_crio(repository: Path) -> None:
    """The command of docs/kubernetes.md, without kubectl."""
    text = (repository / "docs/kubernetes.md").read_text()
    (command,) = re.findall(
        r"^```\n(sed -e .*?) \| kubectl apply.*?^```$", text, re.MULTILINE | re.DOTALL
    )
    made = subprocess.run(
        ["bash", "-euc", command],
        cwd=repository,
        env={"PATH": "/usr/bin:/bin", "registry": "registry.example.org"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "args: [crio, resume, --watch] #" in made
    assert "containerd" not in re.sub(r"#.*", "", made).split("containers:")[1].split("volumes:")[0]
    assert "REGISTRY" not in re.sub(r"#.*", "", made)


def test_the_pod_for_crio(repository: Path) -> None:
    """That of docs/kubernetes.md names its mounts as those do that tests restore over CRI-O."""
    text = (repository / "docs/kubernetes.md").read_text()
    (block,) = re.findall(r"^  ```yaml\n(.*?)^  ```$", text, re.MULTILINE | re.DOTALL)
    pod = yaml.safe_load(textwrap.dedent(block))
    (mount,) = pod["spec"]["containers"][0]["volumeMounts"]
    places = {mount["mountPath"]: mount["mountPath"]}
    tested = pod_of(pod["metadata"]["name"], "default", mounts=places)["spec"]
    assert pod["spec"]["volumes"] == tested["volumes"]
    (container,) = tested["containers"]
    assert [mount] == container["volumeMounts"]
    assert pod["spec"]["containers"][0]["name"] == container["name"]
