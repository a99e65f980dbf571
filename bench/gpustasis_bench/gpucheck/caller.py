# SPDX-License-Identifier: Apache-2.0
"""A disposable process that makes driver calls on request: it may hang or die, and says nothing
else.

Run as `python -m gpustasis_bench.gpucheck.caller`: one JSON request a line on standard input, one
JSON answer a line on standard output. `Caller` is its other end.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from functools import cache
from types import TracebackType
from typing import Any, Self, cast

from gpustasis import nvml
from gpustasis.errors import DriverError
from gpustasis_bench.gpucheck.driver_calls import ARGUMENT_SIZE, Answer, RawDriver

DEADLINE_SECONDS = 120.0  # far above the minute that 80 GB take to stage
_REAP_SECONDS = 10.0


class NoAnswer(DriverError):
    """The caller did not answer in time, or died. It has been killed."""


class Caller:
    """One calling process, with libcuda loaded and cuInit not called."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gpustasis_bench.gpucheck.caller"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the caller."""
        return self._process.pid

    def close(self) -> None:
        """End the process, whatever it is doing; one that cannot die in the driver is left."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_SECONDS)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def call(
        self,
        name: str,
        pid: int,
        *,
        reserved: tuple[int, int] | None = None,
        lock_timeout_ms: int | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> Answer:
        """Call cuCheckpointProcess<name>; `reserved` sets one (offset, byte) of its arguments.

        Raises NoAnswer after deadline_seconds, or if the caller died.
        """
        arguments: bytearray | None = None
        if reserved is not None or lock_timeout_ms is not None:
            arguments = bytearray(ARGUMENT_SIZE)
            if lock_timeout_ms is not None:
                arguments[0:4] = lock_timeout_ms.to_bytes(4, "little")
            if reserved is not None:
                arguments[reserved[0]] = reserved[1]
        request = {"op": "call", "name": name, "pid": pid}
        request["arguments"] = arguments.hex() if arguments is not None else None
        return cast(Answer, self._ask(request, deadline_seconds))

    def driver_version(self) -> str | None:
        """The driver's version, "580.95.05", as NVML has it; None where NVML has none.

        NVML leaves descriptors and threads in the caller: ask one that is not looked at.
        """
        answer = self._ask({"op": "driver version"}, DEADLINE_SECONDS)
        return cast(str | None, answer["value"])

    def persistence_mode(self) -> bool | None:
        """Whether the driver stays loaded while nobody uses the GPUs; None where NVML cannot say.

        As driver_version.
        """
        answer = self._ask({"op": "persistence mode"}, DEADLINE_SECONDS)
        return cast(bool | None, answer["value"])

    def load(self) -> dict[str, Any]:
        """Load libcuda: {"version": …}. Raises DriverError if it cannot be loaded."""
        answer = self._ask({"op": "load"}, DEADLINE_SECONDS)
        if "error" in answer:
            raise DriverError(str(answer["error"]))
        return answer

    def init(self, deadline_seconds: float = DEADLINE_SECONDS) -> dict[str, Any]:
        """Call cuInit: an Answer, with "device" the first GPU's name. Raises NoAnswer."""
        return self._ask({"op": "init"}, deadline_seconds)

    def _ask(self, request: dict[str, Any], deadline_seconds: float) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise AssertionError("the process was started without pipes")
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            self.close()
            raise NoAnswer("the calling process had died") from None
        ready, _, _ = select.select([stdout], [], [], deadline_seconds)
        line = stdout.readline() if ready else b""
        if not line:
            what = request.get("name", request["op"])
            self.close()
            reason = "died" if ready else f"gave no answer within {deadline_seconds:g} s"
            raise NoAnswer(f"{what}: the calling process {reason}")
        return cast(dict[str, Any], json.loads(line))


@cache
def _driver() -> RawDriver:
    return RawDriver()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        match request["op"]:
            case "driver version":
                return {"value": nvml.driver_version()}
            case "persistence mode":
                return {"value": nvml.persistence_mode()}
            case "load":
                return {"version": _driver().version()}
            case "init":
                return {**_driver().init(), "device": _driver().device_name()}
        raw = request["arguments"]
        arguments = bytes.fromhex(raw) if raw is not None else None
        return dict(_driver().call(request["name"], request["pid"], arguments))
    except (OSError, AttributeError, DriverError) as exc:
        return {"error": str(exc), "result": -1, "name": str(exc), "value": None, "seconds": 0.0}


def _serve() -> None:
    # The protocol keeps the real standard output; a driver that prints goes to standard error.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    _serve()
