# SPDX-License-Identifier: Apache-2.0
"""criu, its worker or both are killed with SIGKILL in each phase of a dump with gpu_memory =
"direct".

criu alone: the job runs on, and is exact. With the worker dies what the driver had handed over to
it. A task whose image was complete then comes back out of it; one whose image was not has lost its
memory: it stays suspended, and criu and `gpustasis recover` say so. One that was being given its
memory back is given up by the driver: the job is ended, and comes back from the checkpoint, which
was complete. Nothing else may be lost. Where criu says that it has dumped, or its files do, every
byte is right; some of these are restored. What was complete when somebody died is there
afterwards, whoever lives on."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from campaigns import criu_code, losses
from campaigns.direct_dump import (
    AT_RISK,
    CHECKPOINT,
    END,
    FINISH,
    HANDING_OVER,
    PHASES,
    RESTORING,
    STORED,
    STORING,
    UNLOCKING,
    WITH_WORKER,
    Watch,
    is_stored,
    log_of,
)
from campaigns.hits import Hits
from campaigns.kill_points import describe_changes
from campaigns.ram_dump import is_finished
from campaigns.rig import CRIU_TIMEOUT_S, END_S, Jobs, Rig, criu_errors, workers
from campaigns.steady_job import SteadyJob, restore_thread
from campaigns.tally import FINISHED, RESTORED, Sample, Tally
from campaigns.victims import LATER_S, WATCH_S, Victims, signal_all, stop, strike
from gpustasis.driver import ProcessState
from gpustasis.dump_records import find_begun
from gpustasis.errors import DriverError
from gpustasis.image.verification import verify_directory
from support.arena import restore
from support.driver_states import driver_of

# Two processes with GPU memory, and kernels and copies under way on streams whenever they are
# stopped.
SHAPE = {"mib": 8, "children": 1, "pinned_kib": 64, "registered_kib": 64, "streams": 2}
_LIMIT = 12  # dumps for each hit that is asked for
_MEASURED = 20  # dumps at most
_USED_EACH = 3  # of dumps that are whole all the same, one in so many is restored
_REFUSED_EACH = 5  # and of those that are not, one in so many trials is tried
_STANDS_S = 0.3  # so long what has lost its memory is watched: it would make a step in 20 ms
_LOST = "the memory is lost: end the process"  # recover's words
_CRIU_SAYS_LOST = "the GPU memory of pid {} is lost"
_LEFT = "cuda_plugin: pid {} is left as it is"
_FAILED = "in the driver's state FAILED"
LOST_WITH_WORKER = "lost with the worker"
# Where memory is lost or the driver gives up, a worker that lives on tries again for 10 s: there
# the others have more turns.
_LONG = (*AT_RISK, RESTORING)
_ORDER = (
    *(Victims.CRIU, Victims.BOTH, Victims.CRIU_FIRST, Victims.WORKER),
    *(Victims.BOTH, Victims.CRIU_FIRST, Victims.WORKER_FIRST),
)
OF_WORKER = tuple(one for one in Victims if one is not Victims.CRIU)


@dataclass(slots=True)
class _Killed:
    """What was seen when the first victim died, while both stood still; done: it was in time.
    asked: who was to die of it; victim: who has, the second may have ended by itself.

    stored: tasks whose image was complete when the worker died. criu_in: the phase in which criu
    itself died, which may be a later one; proofs: in which tasks its code stood then. steps and
    output: of the job, which stood. finished: the checkpoint was complete, by its files.
    goes_back: and the job on its way back. undisturbed: criu had ended before, and nobody was
    killed. status: criu's. lost, failed: tasks that are lost with the worker or given up by the
    driver, as they may be."""

    asked: Victims
    phase: str = ""
    victim: Victims = Victims.CRIU
    done: bool = False
    stored: set[int] = field(default_factory=set)
    criu_in: str = ""
    proofs: dict[int, str] = field(default_factory=dict)
    steps: Counter[int] = field(default_factory=Counter)
    output: bytes = b""
    finished: bool = False
    goes_back: bool = False
    undisturbed: bool = False
    status: int = 0
    lost: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{self.victim if self.done else self.asked} killed in {self.phase}"


def run(
    rig: Rig,
    random: Random,
    each: int,
    victims: Sequence[Victims] = (Victims.CRIU,),
    phases: Sequence[str] = PHASES,
) -> Tally:
    """Dumps of one job on `rig` (direct_dump.slow_direct) that are killed, until each of the phases
    was hit `each` times. victims: which of them, in turn; a worker dies in WITH_WORKER alone. What
    is judged and counted is who has died. Dumps that end before they are killed are no trials."""
    tally, used = Tally(), Sample(_USED_EACH)
    names = phases if tuple(victims) == (Victims.CRIU,) else [*filter(WITH_WORKER.count, phases)]
    hits = Hits(names, victims, each)
    with Jobs(lambda: start_job(rig)) as jobs:
        spans = measure(rig, jobs.get())
        reach = dict(spans)  # of the aim, shorter while a phase is missed
        for phase in hits.aims(tally, _LIMIT):
            order = [one for one in _ORDER if one in victims] if phase in _LONG else victims
            victim = hits.whose_turn(phase, order)
            job, images = jobs.get(), rig.images()
            killed = _Killed(victim)
            later_s = random.uniform(0.001, hits.later_s(phase, victim, LATER_S))
            seconds = random.choice((0.0, random.uniform(0, reach[phase])))
            aim = (phase, seconds, later_s)
            try:
                threads = job.threads()
                _kill(rig, job, images, aim, killed)
                factor = 1.5 if killed.phase == phase else 0.5
                reach[phase] = min(spans[phase], factor * reach[phase])
                try:
                    outcome = _judge(rig, job, images, killed)
                finally:  # which may know the phase better
                    if killed.done:
                        hits.add(killed.phase, killed.victim, victim)
                    found = ["trials", f"in {killed.phase}"] if killed.done else ["too late"]
                    tally.counts.update(found)
                    tally.counts[FINISHED] += killed.done and killed.finished
                tally.counts[outcome] += killed.done
                if outcome != _RUNS_ON:
                    jobs.drop()
                elif losses.CRIUS_PHASE not in (killed.phase, killed.criu_in):
                    changed = describe_changes(threads, job.threads())
                    assert not changed, f"its threads have changed: {changed}"
                lives = job if outcome == _RUNS_ON else None
                if _judge_checkpoint(rig, lives, images, killed, tally, used):
                    jobs.drop()
                shutil.rmtree(images)
            except AssertionError as wrong:
                try:
                    _fail(rig, tally, job, killed, wrong)
                    _judge_checkpoint(rig, None, images, killed, tally, used)
                except AssertionError as worse:
                    tally.failures.append(f"{killed}: {worse}")
                jobs.drop()
    if PHASES[-1] in names:  # a criu that dies there has dumped all
        tally.require_restored()
    hits.note(tally)
    losses.limit(tally)
    return tally


_RUNS_ON = "runs on"
_WHOLE = "a whole checkpoint is left"
_REFUSED = "what is left is no checkpoint, and is not restored"


def _fail(rig: Rig, tally: Tally, job: SteadyJob, killed: _Killed, wrong: AssertionError) -> None:
    """Unless what was lost is CRIU's own loss. Of the other tasks the worker that dies after criu
    may lose one as well, which then makes no step."""
    gone = killed.lost | killed.failed
    loss = losses.judge_in(killed.criu_in, job, killed.proofs, gone)
    if killed.criu_in == losses.CRIUS_PHASE and not loss.lacks:
        if gone:
            _require_suspended(rig, job, killed.lost, killed.failed, killed)
        tally.counts[f"LOST to {loss.of_what}, CRIU's own code stood there"] += 1
    else:
        tally.failures.append(f"{killed}: {wrong}; {loss.lacks}")


def start_job(rig: Rig) -> SteadyJob:
    name = rig.images().with_suffix(".job")
    return SteadyJob(rig.programs.job, name, rig.environ, module=rig.programs.kernels, **SHAPE)


def cuda_pids(job: SteadyJob) -> tuple[int, ...]:
    return tuple(pid for pid in job.pids if restore_thread(pid) is not None)


def measure(rig: Rig, job: SteadyJob) -> dict[str, float]:
    """The seconds that each phase of an undisturbed dump lasts, at most."""
    spans = dict.fromkeys(PHASES, 0.0)
    shortest = (HANDING_OVER, STORING, STORED, RESTORING, UNLOCKING)
    for _ in range(_MEASURED):  # one may miss a short phase, more so on a busy machine
        for phase, seconds in _measure_one(rig, job).items():
            spans[phase] = max(spans.get(phase, 0.0), seconds)
        if all(spans[phase] > 0 for phase in shortest):
            return spans
    raise AssertionError(f"no dump is ever seen in some phase: {spans}")


def _measure_one(rig: Rig, job: SteadyJob) -> dict[str, float]:
    images = rig.images()
    spans: dict[str, float] = defaultdict(float)
    with Watch(rig, images, cuda_pids(job)) as watch:
        criu = rig.start(rig.dump_words(job, images, ["--leave-running"]))
        before = time.monotonic()
        while criu.poll() is None:
            phase, now = watch.phase(), time.monotonic()
            spans[phase] += now - before
            before = now
            time.sleep(WATCH_S)
    assert criu.returncode == 0, criu_errors(images, "dump")
    rig.settle(images)
    job.run_on()
    return spans


def _kill(
    rig: Rig, job: SteadyJob, images: Path, aim: tuple[str, float, float], killed: _Killed
) -> None:
    """aim: the phase, how many seconds after its begin, and after the first dies the second."""
    wanted, seconds, later_s = aim
    with Watch(rig, images, cuda_pids(job)) as watch:
        criu = rig.start(rig.dump_words(job, images, ["--leave-running"]))
        later = (*PHASES[PHASES.index(wanted) :], END)
        while criu.poll() is None and watch.phase() not in later:
            time.sleep(WATCH_S)
        deadline = time.monotonic() + seconds
        killed.phase = watch.phase()
        while criu.poll() is None and time.monotonic() < deadline:
            killed.phase = watch.phase()  # what the driver says is the newer for it
            time.sleep(WATCH_S)
        if not stop(criu):
            killed.phase, killed.undisturbed, killed.status = END, True, criu.wait()
            return
        found = workers(images)
        signal_all(found, signal.SIGSTOP)
        killed.phase = watch.phase()

        def note() -> None:
            if killed.asked is not Victims.WORKER and criu.poll() is None:
                killed.criu_in = watch.phase()
                killed.proofs = criu_code.proofs(job.pids)
            _note(job, images, killed)

        note()
        if killed.asked is not Victims.CRIU and not found:
            criu.kill()
            killed.status = criu.wait()
            return
        killed.victim = strike(criu, found, killed.asked, later_s, note)
        if killed.victim is Victims.WORKER:  # criu was not killed, wherever it once stood
            killed.criu_in, killed.proofs = "", {}
        killed.status = criu.wait(CRIU_TIMEOUT_S)
        killed.done = killed.phase != END


def _note(job: SteadyJob, images: Path, killed: _Killed) -> None:
    killed.stored = {pid for pid in cuda_pids(job) if is_stored(images, pid)}
    killed.steps, killed.output = job.steps(), job.log.read_bytes()
    killed.finished |= is_finished(images)
    killed.goes_back = killed.finished and "cuda_plugin: bringing back pid" in log_of(images)


def _judge(rig: Rig, job: SteadyJob, images: Path, killed: _Killed) -> str:
    """What became of the job. Raises AssertionError: it may not."""
    victim = killed.victim
    rig.settle(images)
    assert killed.status == 0 or not killed.undisturbed, (
        f"nobody was killed, and criu ended with {killed.status}: {criu_errors(images, 'dump')}"
    )
    if victim is Victims.CRIU or not killed.done:
        job.run_on()
        return _RUNS_ON
    left = {pid for pid in cuda_pids(job) if _LEFT.format(pid) in log_of(images)}
    if victim is Victims.WORKER:  # criu itself brings back what can be
        job.run_on(without=left)
    said = _recover(rig, cuda_pids(job), images)
    lost = {pid for pid, text in said.items() if _LOST in text}
    failed = {pid for pid, text in said.items() if _FAILED in text}
    wrong = {pid: text for pid, text in said.items() if text and pid not in lost | failed}
    assert not wrong, f"recover: {wrong}"
    if lost and killed.phase == CHECKPOINT:
        killed.phase = HANDING_OVER  # the driver's answer came too late to be seen
    if failed and killed.phase == FINISH and killed.goes_back:
        killed.phase = RESTORING
    log = log_of(images)
    criu_says = {pid for pid in said if _CRIU_SAYS_LOST.format(pid) in log}
    assert not lost or killed.phase in AT_RISK, f"lost: {lost}"
    assert not lost & killed.stored, f"lost, with complete images: {lost & killed.stored}"
    assert not criu_says & killed.stored, f"criu says that it lost {criu_says & killed.stored}"
    if victim is Victims.WORKER:
        assert criu_says == lost, f"lost are {lost}, and criu says it of {criu_says}"
        assert left == lost | failed, f"criu has left {left}, and gone are {lost | failed}"
    given_up = killed.phase == RESTORING
    if victim is Victims.CRIU_FIRST:  # then the worker had begun to hand back
        given_up = killed.phase in PHASES[PHASES.index(HANDING_OVER) :]
    assert not failed or given_up, f"given up by the driver: {failed}"
    killed.lost, killed.failed = lost, failed
    job.run_on(without=lost | failed)
    if not lost and not failed:
        return _RUNS_ON
    _require_suspended(rig, job, lost, failed, killed)
    if lost:
        assert killed.status != 0, "criu says that it has dumped, and memory is lost"
        assert not is_finished(images), "there is a checkpoint of a job whose memory was lost"
        return LOST_WITH_WORKER
    job.end()
    if not is_finished(images):
        assert not killed.finished, "given up by the driver, and its complete checkpoint is gone"
        return "given up by the driver while it was handed back, before criu had dumped all"
    job.log.write_bytes(killed.output)  # CRIU restores a file only at the size that it had
    restored = rig.restore(images)
    assert restored.status == 0, f"not restored from the complete checkpoint: {restored.errors}"
    job.run_on()
    return "given up by the driver while it was handed back, restored from the checkpoint"


def _judge_checkpoint(
    rig: Rig, job: SteadyJob | None, images: Path, killed: _Killed, tally: Tally, used: Sample
) -> bool:
    """Of one that is said to be there every byte is right, and what was complete when somebody died
    is there: a dump that fails afterwards keeps it (dump_end.cpp). job: goes on from it, if `used`
    says so. What is none cannot be restored: then the job has ended, which is what is returned."""
    is_there = is_finished(images)
    assert is_there or not killed.finished, "the checkpoint was complete, and is gone"
    assert is_there or killed.status != 0, "criu says that it has dumped, and there is none"
    if not is_there:
        if job is not None and killed.done and tally.counts["trials"] % _REFUSED_EACH == 1:
            job.end()
            refused = rig.restore(images)
            assert refused.status != 0, "what is no checkpoint was restored"
            _require_gone(job)
            tally.counts[_REFUSED] += 1
            return True
        return False
    problems = verify_directory(images).problems
    assert not problems, f"a dump that is whole: {problems[0]}"
    tally.counts[_WHOLE] += killed.done
    if job is not None and killed.done and used.takes(killed.criu_in):
        job.end()
        restore(rig, job, images)
        tally.counts[RESTORED] += 1
    return False


def _require_gone(job: SteadyJob) -> None:
    """What a refused restore has begun to make has been ended again."""
    deadline = time.monotonic() + END_S
    while left := job.alive_pids():
        assert time.monotonic() < deadline, f"a refused restore leaves {left}"
        time.sleep(WATCH_S)


def _require_suspended(
    rig: Rig, job: SteadyJob, lost: set[int], failed: set[int], killed: _Killed
) -> None:
    """What lacks memory has not made a step since, and makes none."""
    time.sleep(_STANDS_S)
    driver, now = driver_of(rig.environ), job.steps()
    for pid in lost | failed:
        wanted = ProcessState.CHECKPOINTED if pid in lost else ProcessState.FAILED
        assert (state := driver.get_state(pid)) is wanted, f"pid {pid} is {state.name}"
        assert now[pid] == killed.steps[pid], f"pid {pid} lacks memory, and has made steps"


def _recover(rig: Rig, pids: Sequence[int], images: Path) -> dict[int, str]:
    """`gpustasis recover` of each that does not run, or of which a record is left; what was wrong,
    "" if nothing was."""
    driver, said = driver_of(rig.environ), dict.fromkeys(pids, "")
    for pid in pids:
        try:
            runs = driver.get_state(pid) is ProcessState.RUNNING
        except DriverError as exc:  # it ends
            said[pid] = str(exc)
            continue
        if runs and not find_begun(pid):
            continue
        recovered = subprocess.run(
            [sys.executable, "-m", "gpustasis", "recover", str(pid), "-D", str(images)],
            env=dict(rig.environ),
            capture_output=True,
            text=True,
            timeout=CRIU_TIMEOUT_S,
            check=False,
        )
        if recovered.returncode != 0:
            said[pid] = " ".join(recovered.stderr.split()) or "it gives no reason"
    return said
