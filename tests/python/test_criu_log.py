# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

from gpustasis.criu.log import (
    ERRORS_SHOWN,
    LogTail,
    criu_errors,
    meanings,
    phase_of,
    plugin_errors,
)

# Lines as CRIU 4.1.1 and 4.2.1 write them, the plugin's among them.
LOG = """\
(00.000011) Version: 4.2.1 (gitid 0)
(00.000020) Error (criu/rlimit.c:39): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted
(00.010000) cuda_plugin: pid 42: locked
(00.020000) Error (gpustasis): cuda_plugin: pid 42: cannot write gpustasis-42.img: No space left on device
(00.020001) Error (criu/cr-dump.c:1900): CHECKPOINT_DEVICES failed
(00.020002)     42: Error (criu/mem.c:1): second
(00.020003) Error (criu/mem.c:2): third
(00.020004) Error (criu/mem.c:3): fourth
(00.020005) Dumping FAILED.
"""


def test_the_plugins_errors_are_told_from_its_other_lines() -> None:
    assert plugin_errors(LOG) == ["pid 42: cannot write gpustasis-42.img: No space left on device"]


def test_the_first_errors_of_criu_are_shown_without_the_harmless_one() -> None:
    assert criu_errors(LOG) == ["CHECKPOINT_DEVICES failed", "second", "third"]
    assert len(criu_errors(LOG)) == ERRORS_SHOWN


def test_what_to_do_is_said_of_errors_that_do_not_say_it() -> None:
    twice = ["Can't fork for 42: File exists", "Can't fork for 42: File exists"]
    (taken,) = meanings(twice)
    assert taken.startswith("process 42, ") and "end it" in taken
    (grown,) = meanings(["File tmp/log has bad size 90 (expect 70)"])
    assert "bring back its 70 bytes" in grown
    assert "install the same one" in meanings(["File libcuda.so.1 has bad build-ID"])[0]
    assert meanings(criu_errors(LOG)) == []


def test_a_clean_log_has_no_errors() -> None:
    clean = "(00.1) Dumping finished successfully\n(00.2) Warn  (criu/x.c:1): Error is a word\n"
    assert plugin_errors(clean) == []
    assert criu_errors(clean) == []


def test_phases_are_ours_word_for_word_and_criu_s_in_plain_words() -> None:
    assert phase_of("(00.01) cuda_plugin: pid 42: locked") == "pid 42: locked"
    assert phase_of("(00.01) Dumping task (pid: 42 comm: x)") == "dumping processes"
    assert phase_of("(00.01) vma 7f00-7f01") is None


def test_the_tail_gives_each_complete_line_once(tmp_path: Path) -> None:
    path = tmp_path / "dump.log"
    tail = LogTail(path)
    assert tail.poll() == []
    with path.open("w") as file:
        for text, lines in (
            ("one\ntw", ["one"]),
            ("o\n", ["two"]),
            ("", []),
            ("3\n4\n", ["3", "4"]),
        ):
            file.write(text)
            file.flush()
            assert tail.poll() == lines
