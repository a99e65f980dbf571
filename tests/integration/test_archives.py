# SPDX-License-Identifier: Apache-2.0
"""Archives of real checkpoints: what CRIU wrote, packed as the engines pack it."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

from click.testing import CliRunner, Result

from campaigns.rig import Rig
from gpustasis.cli import cli
from support.archives import ENGINES, pack


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def test_a_job_goes_on_from_a_flattened_archive(newest_rig: Rig, tmp_path: Path) -> None:
    """An incremental checkpoint in a packed archive, its parent in another; the directories are
    gone before the restore."""
    rig = newest_rig
    with rig.job(mib=8, children=1, alike=1) as job:  # most of it never changes
        one, two = rig.images(), rig.images()
        dumped = rig.dump(job, one, "--leave-running")
        assert dumped.status == 0, dumped.errors
        job.run_on()
        dumped = rig.dump(job, two, config={"parent": str(one)})
        assert dumped.status == 0, dumped.errors
        assert job.wait() == -signal.SIGKILL
        steps = job.steps()
        rig.settle(two)

        whole = json.loads(run("inspect", "--json", two).stdout)
        parent = pack(one, tmp_path / "one.tar.gz", engine="cri-o", compression="gzip")
        for engine, compression in zip(ENGINES, ("zstd", "none", "gzip"), strict=True):
            archive = pack(two, tmp_path / engine, engine=engine, compression=compression)
            found = json.loads(run("inspect", "--json", archive, "--parent", parent).stdout)
            assert found["archive"]["engine"] == engine
            assert [p["comm"] for p in found["processes"]] == ["steady_job"] * 2
            same = {"checkpoint_id", "gpus", "timings_ms", "gpu_image_bytes", "other_bytes"}
            assert {key: found[key] for key in same} == {key: whole[key] for key in same}
            verified = run("verify", archive, "--parent", parent)
            assert verified.exit_code == 0, verified.output
            assert "of it in 1 earlier checkpoint" in verified.output
        shutil.rmtree(one)
        shutil.rmtree(two)

        flat = tmp_path / "flat"
        done = run("flatten", tmp_path / "podman", "-o", flat, "--parent", parent)
        assert done.exit_code == 0, repr(done.exception)
        assert run("verify", flat).exit_code == 0
        restored = rig.restore(flat)
        assert restored.status == 0, restored.errors
        job.run_on()
        assert job.steps() > steps
