# SPDX-License-Identifier: Apache-2.0
"""What annotations may say, and how it is written down."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustasis.errors import PolicyError
from gpustasis.policy import (
    ANNOTATIONS,
    PREFIX,
    format_policy,
    is_container_id,
    keep_of,
    parse_annotations,
    rank_of,
)

CONTAINER_ID = "0123456789abcdef" * 4
RIGHT: dict[str, dict[str, object]] = {
    "compress": {"lz4": "lz4", "none": "none"},
    "cpu-memory": {"criu": "criu", "ours": "ours", "auto": "auto"},
    "externalize": {"true": True, "false": False},
    "incremental": {"true": True, "false": False},
    "layout": {"criu": "criu", "packed": "packed"},
    "parent": {"/a": "/a", "/a b/ü\"\\'#": "/a b/ü\"\\'#", "/": "/"},
    "threads": {"0": 0, "8": 8, "1024": 1024},
    "timeout": {"1ms": 1, "10s": 10_000, "2m": 120_000, "2147483647ms": 2147483647},
    "keep": {"1": 1, "100000": 100_000},
}
# Together only.
OF_RANK: dict[str, dict[str, object]] = {
    "job": {"train": "train", "a.b_c-9": "a.b_c-9", "9" * 128: "9" * 128},
    "rank": {"0": 0, "1048575": 1048575},
    "world": {"1048576": 1048576},
}
WRONG = {
    "compress": ["", "LZ4", "zstd", "lz4 "],
    "cpu-memory": ["", "true", "Ours", "criu "],
    "externalize": ["", "yes", "1", "True", "off"],
    "incremental": ["", "on"],
    "layout": ["", "Packed", "true"],
    "parent": ["", "a", "../a", "/a/../b", "/..", "/a\n", "/a\0", "/\ud800", "/" + "a" * 4095],
    "threads": ["", "-1", "+1", "1025", "1_0", " 1", "１", "1.0", "0x1", "many", "9" * 5000],
    "timeout": [
        "",
        "10",
        "0s",
        "1h",
        "1.5s",
        "-1s",
        "35792m",
        "2147483648ms",
        "s",
        "1sm",
        "9" * 99,
    ],
    "keep": ["", "0", "100001", "all"],
    "job": ["", ".a", "-a", "_", "a/b", "a b", "ä", "1" * 129, "a\n"],
    "rank": ["", "-1", "1048576", "0x1", "all"],
    "world": ["", "0", "1048577", "2.0"],
}


def ours(**words: str) -> dict[str, object]:
    return {PREFIX + name: text for name, text in words.items()}


def test_there_is_a_case_for_every_annotation() -> None:
    assert set(RIGHT) | set(OF_RANK) == set(WRONG) == set(ANNOTATIONS)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [(name, text, value) for name, texts in RIGHT.items() for text, value in texts.items()],
)
def test_what_is_allowed_is_taken(name: str, text: str, value: object) -> None:
    policy = parse_annotations({"org.example": "x"} | ours(**{name: text}))
    assert policy is not None
    key = ANNOTATIONS[name].key
    assert (policy.settings == {key: value}) if key else (policy.keep == value)
    written = tomllib.loads(format_policy(policy, CONTAINER_ID))
    assert written.pop("container")["annotations"] == {PREFIX + name: text}
    assert written == policy.settings


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [(name, text, value) for name, texts in OF_RANK.items() for text, value in texts.items()],
)
def test_a_rank_is_taken(name: str, text: str, value: object) -> None:
    words = {"job": "train", "rank": "0", "world": "1048576", "keep": "2"} | {name: text}
    policy = parse_annotations(ours(**words))
    assert policy is not None and policy.rank is not None
    assert getattr(policy.rank, name) == value
    assert (policy.keep, policy.settings) == (2, {"found_locked": "dump"})
    written = format_policy(policy, CONTAINER_ID)
    assert tomllib.loads(written)["container"]["rank"][name] == value
    again = rank_of(written)
    assert again is not None and getattr(again, name) == value


def test_what_holds_the_namespaces_of_a_pod_is_no_rank() -> None:
    words = ours(job="a", rank="0", world="2")
    policy = parse_annotations(words | {"io.kubernetes.cri-o.ContainerType": "sandbox"})
    assert policy is not None and policy.rank is None
    policy = parse_annotations(words | {"io.kubernetes.cri-o.ContainerType": "container"})
    assert policy is not None and policy.rank is not None


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"job": "a"}, "needs io.gpustasis.rank as well"),
        ({"job": "a", "rank": "0"}, "needs io.gpustasis.world as well"),
        ({"rank": "0", "world": "2"}, "needs io.gpustasis.job as well"),
        ({"job": "a", "rank": "2", "world": "2"}, "must be 0 to 1, by io.gpustasis.world"),
    ],
)
def test_a_rank_is_said_as_a_whole(words: dict[str, str], why: str) -> None:
    with pytest.raises(PolicyError, match=why):
        parse_annotations(ours(**words))


@pytest.mark.parametrize(
    "text",
    [
        *("", "[container]\nrank = 1", "[container.rank]\njob = 'a'", "]"),
        "[container.rank]\njob = 'a/b'\nrank = 0\nworld = 1",
        "[container.rank]\njob = 'a'\nrank = 1\nworld = 1",
        "[container.rank]\njob = 'a'\nrank = true\nworld = 1",
    ],
)
def test_a_rank_is_not_read_out_of_anything_else(text: str) -> None:
    with pytest.raises(PolicyError, match="it is no policy file"):
        rank_of(text)


def test_a_container_without_a_job_is_no_rank() -> None:
    assert rank_of("[container]\nid = 'a'\n") is None


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in WRONG.items() for text in texts]
)
def test_what_is_not_allowed_is_named_in_one_sentence(name: str, text: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_annotations(ours(**{name: text}))
    message = str(caught.value)
    assert message.startswith(f"annotation {PREFIX}{name} = ")
    assert message.endswith(f"must be {ANNOTATIONS[name].allowed}")
    assert len(message) < 400
    assert message.isprintable()


def test_encryption_is_refused_and_not_ignored() -> None:
    with pytest.raises(PolicyError, match=r"io\.gpustasis\.encrypt = .*\(recipients\)"):
        parse_annotations(ours(encrypt="age1xyz"))


@pytest.mark.parametrize("name", ["", "Compress", "thread", "x" * 5000, "\n", "keep.all"])
def test_an_unknown_annotation_is_refused(name: str) -> None:
    with pytest.raises(
        PolicyError, match=r"there is no such annotation, only io\.gpustasis\.compress"
    ):
        parse_annotations({PREFIX + name: "1"})


@pytest.mark.parametrize("value", [None, 1, True, ["lz4"], {"a": 1}])
def test_a_value_must_be_text(value: object) -> None:
    with pytest.raises(PolicyError, match="must be"):
        parse_annotations({PREFIX + "compress": value})


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ({"incremental": "true", "externalize": "false"}, "incremental"),
        ({"parent": "/a", "externalize": "false"}, "parent"),
        ({"parent": "/a", "externalize": "false", "cpu-memory": "criu"}, "parent"),
        ({"parent": "/a", "incremental": "true"}, "parent"),
    ],
)
def test_what_does_not_go_together_is_refused(words: dict[str, str], named: str) -> None:
    with pytest.raises(PolicyError, match=f"annotation {PREFIX}{named} = "):
        parse_annotations(ours(**words))


def test_what_only_seems_to_clash_is_taken() -> None:
    assert parse_annotations(ours(incremental="false", externalize="false")) is not None
    assert parse_annotations(ours(parent="/a", incremental="false")) is not None
    for who in ("ours", "auto"):  # there is CPU memory to build on a parent
        words = {"incremental": "true", "externalize": "false", "cpu-memory": who}
        assert parse_annotations(ours(**words)) is not None


@given(st.dictionaries(st.text(), st.text()))
def test_other_peoples_annotations_are_none_of_our_business(found: dict[str, str]) -> None:
    others = {name: text for name, text in found.items() if not name.startswith(PREFIX)}
    assert parse_annotations(others) is None


@given(st.dictionaries(st.sampled_from(sorted(ANNOTATIONS)), st.text(), min_size=1))
def test_any_text_is_taken_or_refused(words: dict[str, str]) -> None:
    try:
        policy = parse_annotations(ours(**words))
    except PolicyError as exc:
        assert str(exc).startswith(f"annotation {PREFIX}")
        return
    assert policy is not None
    written = tomllib.loads(format_policy(policy, CONTAINER_ID))
    assert written["container"]["annotations"] == ours(**words)
    assert keep_of(format_policy(policy, CONTAINER_ID)) == policy.keep


@given(st.from_regex(r"/[^\x00]{0,40}", fullmatch=True))
def test_any_path_survives_the_file(path: str) -> None:
    try:
        policy = parse_annotations(ours(parent=path))
    except PolicyError:
        return
    assert policy is not None
    assert tomllib.loads(format_policy(policy, CONTAINER_ID))["parent"] == path


def test_ids_of_containers() -> None:
    assert is_container_id(CONTAINER_ID)
    for wrong in (
        "",
        CONTAINER_ID[1:],
        CONTAINER_ID + "0",
        CONTAINER_ID.upper(),
        "../" * 22,
        "g" * 64,
    ):
        assert not is_container_id(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[container",
        "container = 1",
        "[container]\nkeep = 0",
        '[container]\nkeep = "1"',
        "[container]\nkeep = true",
        "[container]\nkeep = 1e3",
        "[container]\nkeep = 1000000",
    ],
)
def test_a_file_that_is_no_policy(text: str) -> None:
    with pytest.raises(PolicyError):
        keep_of(text)
