# SPDX-License-Identifier: Apache-2.0
"""A restore that fails kills its tasks before criu asks its script: whoever looks then, as the
keeper of a rank does, finds them dead, and not about to die."""

from __future__ import annotations

from campaigns.rig import Rig
from gpustasis._core import image_name
from support.job_ranks import wait_for


def test_the_script_finds_no_task_alive_where_memory_is_damaged(rig: Rig) -> None:
    found, script = rig.scratch / "found", rig.scratch / "script"
    with rig.job(mib=192, plain_threads=2) as job:  # it takes a while to die
        script.write_text(
            '#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" = pre-resume ] || exit 0\n'
            f"grep -h State: /proc/{job.pid}/task/*/status >{found}\n"
        )
        script.chmod(0o700)
        images = rig.images()
        assert rig.dump(job, images).status == 0
        job.wait()
        image = images / image_name(job.pid)
        with image.open("r+b") as file:
            file.seek(image.stat().st_size // 2)
            (byte,) = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        restored = rig.restore(images, "--action-script", str(script))
        assert restored.status != 0
        assert "does not match its checksum" in restored.errors
        if "Running pre-resume scripts" not in restored.log:  # from 4.3 on
            assert "Device hook failed" in restored.errors
            return
        found.touch()
        # criu need not wait for a script where a task has died.
        wait_for(lambda: bool(found.read_text()), str(found))
        states = [line.split()[1] for line in found.read_text().splitlines()]
        assert set(states) <= {"Z", "X"}, states
