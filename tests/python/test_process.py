# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from gpustasis.process import OUTPUT_LIMIT, Finished, run
from support.job_ranks import wait_for


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_tells_status_and_both_outputs_together() -> None:
    ended = run(python("import os; os.write(1, b'out '); os.write(2, b'err'); raise SystemExit(3)"))
    assert (ended.status, ended.output, ended.ending) == (3, "out err", "exit 3")


def test_tells_the_signal_that_killed_it() -> None:
    ended = run(python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    assert ended.ending == "killed by signal 9"


def test_keeps_the_end_of_much_output() -> None:
    ended = run(python(f"print('x' * {OUTPUT_LIMIT + 5}); print('the end')"))
    assert len(ended.output) == OUTPUT_LIMIT
    assert ended.output.endswith("the end\n")


def test_does_not_wait_for_what_outlives_it() -> None:
    begin = time.monotonic()
    ended = run(python("import os, time; print(pid) if (pid := os.fork()) else time.sleep(30)"))
    os.kill(int(ended.output), signal.SIGKILL)
    assert time.monotonic() - begin < 20


def test_too_long_is_killed() -> None:
    with pytest.raises(TimeoutError, match="did not end in time"):
        run(python("import time; time.sleep(60)"), timeout_s=0.3)


def test_what_is_bounded_has_a_session_of_its_own() -> None:
    """And so no controlling terminal: a key command could ask on ours for a password."""
    code = "import os; print(os.getsid(0) == os.getpid() == os.getpgrp())"
    assert run(python(code), apart=True, bounded=True).output == "True\n"
    assert run(python(code), apart=True).output == "False\n"


def test_errors_of_what_is_bounded_fill_no_memory() -> None:
    """However fast it writes: it says on stdout how often it has written 64 KiB."""
    code = "import os\nwhile True: os.write(2, bytes(65536)); os.write(1, b'x')"
    with tempfile.TemporaryFile() as said:
        with pytest.raises(OSError, match="bytes of errors"):
            run(python(code), apart=True, bounded=True, stdout=said.fileno())
        assert said.tell() * 65536 <= 4 * OUTPUT_LIMIT


def test_all_errors_of_what_is_bounded_are_kept() -> None:
    code = f"import os; os.write(2, b'x' * {OUTPUT_LIMIT - 7}); os.write(2, b'the end')"
    ended = run(python(code), apart=True, bounded=True)
    assert len(ended.errors) == OUTPUT_LIMIT
    assert ended.errors.endswith("xthe end")


def test_stdin_is_empty() -> None:
    assert run(python("import sys; print(repr(sys.stdin.read()))")).output == "''\n"


def run_for_two_ticks(go: Path, then: str) -> Finished:
    """A program that runs until it was called back twice, however late that is."""
    ticks = []

    def tick() -> None:
        ticks.append(time.monotonic())
        if len(ticks) == 2:
            go.touch()

    waits = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    ended = run(python(waits + then), on_tick=tick, timeout_s=60)
    assert len(ticks) >= 2
    return ended


def test_calls_back_while_it_runs(tmp_path: Path) -> None:
    run_for_two_ticks(tmp_path / "go", "")


def test_without_a_descriptor_the_end_is_seen_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def pidfd_open(pid: int) -> int:
        raise OSError(errno.EMFILE, "none is left")

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    ended = run_for_two_ticks(tmp_path / "go", "raise SystemExit(3)")
    assert ended.status == 3
    with pytest.raises(TimeoutError):
        run(python("import time; time.sleep(60)"), timeout_s=0.3)


@pytest.mark.parametrize("shielded", [True, False], ids=["shielded", "plain"])
def test_only_what_is_shielded_survives_ctrl_c(shielded: bool, tmp_path: Path) -> None:
    begun, go, interrupted = tmp_path / "begun", tmp_path / "go", threading.Event()

    def interrupt(number: int, _: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def send() -> None:
        """Once the program runs. It goes on when that has come."""
        wait_for(begun.exists, "the program")
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted.wait(60)
        if shielded:
            go.touch()

    code = (
        f"import os, time; open({str(begun)!r}, 'w')\n"
        f"while not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
        "print('finished')"
    )
    # A shell has what it runs in the background ignore SIGINT, these tests perhaps among it.
    before = signal.signal(signal.SIGINT, interrupt)
    sending = threading.Thread(target=send)
    sending.start()
    try:
        said = run(python(code), shielded=shielded, timeout_s=60).output
    except KeyboardInterrupt:
        said = "interrupted"
    finally:
        sending.join()
        signal.signal(signal.SIGINT, before)
    assert interrupted.is_set()
    assert said == ("finished\n" if shielded else "interrupted")


def test_an_answer_can_be_had_without_what_is_said_beside_it() -> None:
    """Podman warns on stderr, and answers in JSON on stdout."""
    words = ["sh", "-c", "echo warning >&2; echo '[]'"]
    ended = run(words, apart=True)
    assert (ended.output, ended.errors) == ("[]\n", "warning\n")
    assert run(words).output == "warning\n[]\n"
