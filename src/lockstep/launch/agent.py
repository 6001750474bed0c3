"""What a launcher does on its machine: round after round, starts workers, watches them, and ends them."""

from __future__ import annotations

import platform
import signal
import time
from collections.abc import Callable, Mapping

from lockstep.launch.plan import LaunchPlan
from lockstep.launch.rendezvous import (
    CoordinatorLost,
    LaunchEnded,
    Rendezvous,
    Round,
    launch_ended_of,
    verb_of,
)
from lockstep.launch.report import Failure, count_alike, describe_failure, exit_code, first_failure
from lockstep.launch.signals import Interrupted, Signals
from lockstep.launch.workers import Starter, Workers
from lockstep.runtime.failure import PREEMPTED, of_signal

# Messages and signals are looked at so often; workers too, unless the plan says less often.
MONITOR_INTERVAL_S = 0.1
# Between the polite signal and SIGKILL; with it a launch is over within 2 s of its end being decided.
GRACE_S = 1.5
# How long a rank that is not the cause waits for the one that is.
CAUSE_WAIT_S = 3.0


class Agent:
    """Runs a plan's workers on this machine, in the rounds that the coordinator forms.

    Args:
        hosting: the coordinator is part of this launcher.
        starter: makes the workers of a round, and sweeps up after it.
        upkeep: called a few times a second.
        signals: the launcher's, taken over already.
        interrupted: called with a signal's name and an exit code when one ends the launch, before anything else.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        rendezvous: Rendezvous,
        hosting: bool,
        starter: Starter,
        upkeep: Callable[[], None],
        signals: Signals,
        interrupted: Callable[[str, int], None],
        say: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._rendezvous = rendezvous
        self._hosting = hosting
        self._starter = starter
        self._upkeep = upkeep
        self._interrupted = interrupted
        self._say = say
        self._signals = signals
        self._workers: Workers | None = None
        self._own: Failure | None = None
        self._alike = 1
        self._world_size = plan.nproc

    def run(self) -> int:
        """Run the launch to its end. Returns its exit code.

        Raises:
            ConfigError: the coordinator does not let this machine in.
        """
        try:
            self._signals.install()
            self._signals.release()
            while True:
                over = self._round()
                if over is not None:
                    return self._report(over)
        except Interrupted as error:
            self._signals.ignore()
            self._interrupted(error.signal.name, error.code)
            self._end_workers(error.signal)
            self._say(f"lockstep: ended by {error.signal.name}; all processes were ended.")
            return error.code
        except CoordinatorLost as error:
            self._end_workers(signal.SIGTERM)
            self._say(f"lockstep: {error} All processes here were ended.")
            return 1
        finally:
            self._end_workers(signal.SIGTERM)
            self._starter.close()

    def _round(self) -> LaunchEnded | None:
        """Run one round. Returns None if another one follows."""
        place = self._rendezvous.join(self._upkeep)
        if isinstance(place, LaunchEnded):
            return place
        self._own = None
        self._world_size = place.world_size
        self._signals.boundary = True
        self._workers = self._starter.start(place)
        try:
            return self._watch(place, self._workers)
        except CoordinatorLost as error:
            if not self._plan.elastic or self._hosting:
                raise
            self._end_workers(signal.SIGTERM)
            self._say(f"lockstep: {error} All processes here were ended; this machine tries to join again.")
            self._signals.boundary = False
            self._rendezvous.rejoin(self._upkeep)
            return None
        finally:
            self._end_workers(signal.SIGTERM)
            self._signals.boundary = False

    def _watch(self, place: Round, workers: Workers) -> LaunchEnded | None:
        ends = _WorkerEnds(self._plan, self._rendezvous, place, workers, self._tell_failure)
        interval, next_look = self._plan.fault_policy.monitor_interval_s, 0.0
        while True:
            # The wait for a message is also the pause between two looks.
            message = self._rendezvous.receive(min(interval, MONITOR_INTERVAL_S))
            verb = verb_of(message)
            if message is not None and verb == "over":
                return launch_ended_of(message)
            if message is not None and verb == "end" and message["round"] == place.number:
                return None
            if message is not None and verb == "stopping":
                name = str(message["signal"])
                ends.stop_code = of_signal(signal.Signals[name]) if name else of_signal(signal.SIGTERM)
            self._upkeep()
            asked = self._signals.asked()
            if asked is not None:
                self._rendezvous.tell("stop", signal=asked.name)
            now = time.monotonic()
            # What happened here was told: from now on the coordinator's word counts.
            if ends.is_reported or now < next_look:
                continue
            next_look = now + interval if interval > MONITOR_INTERVAL_S else 0.0
            ends.look(now)

    def _tell_failure(self, place: Round, workers: Workers) -> None:
        failure = self._own = first_failure(workers.failures())
        self._rendezvous.tell(
            "failed",
            round=place.number,
            rank=failure.rank,
            host=platform.node(),
            code=exit_code(failure),
            summary=failure.summary,
            consequence=bool(failure.own.get("consequence")),
        )

    def _end_workers(self, number: signal.Signals) -> None:
        if self._workers is not None:
            workers, self._workers = self._workers, None
            workers.end(number, GRACE_S)
            # Only now have all others written what they failed with.
            if self._own is not None:
                self._alike = count_alike(self._own, workers.failures())
            self._starter.sweep()

    def _report(self, over: LaunchEnded) -> int:
        """Say how the launch ended; a failure here in full."""
        if over.code == 0:
            return 0
        if self._own is not None and self._own.rank == over.rank:
            self._say(describe_failure(self._own, self._world_size, self._alike))
        else:
            ended = "" if over.code == PREEMPTED else "; all processes were ended"
            self._say(f"lockstep: {over.cause.rstrip('.')}{ended}.")
        if over.note:
            self._say(f"lockstep: {over.note}")
        return over.code


class _WorkerEnds:
    """How the workers of one round end here, told as far as the coordinator has to know it.

    Args:
        tell_failure: Tells the first failure.

    Attributes:
        stop_code: With which a rank ends that stops as all were asked to; None: nobody has asked.
        is_reported: Whether it was told what came of all of them.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        rendezvous: Rendezvous,
        place: Round,
        workers: Workers,
        tell_failure: Callable[[Round, Workers], None],
    ) -> None:
        self._plan = plan
        self._rendezvous = rendezvous
        self._place = place
        self._workers = workers
        self._tell_failure = tell_failure
        self._left: set[int] = set()
        self._cause_limit: float | None = None
        self._give_up: float | None = None
        self.stop_code: int | None = None
        self.is_reported = False

    def look(self, now: float) -> None:
        """Look at the workers' exit codes."""
        codes = self._workers.exit_codes()
        self._tell_left(codes)
        # Ranks that stopped at a boundary, as they were asked to, have not failed.
        polite = {0, PREEMPTED, self.stop_code}
        if any(code not in polite for code in codes.values()):
            self._cause_limit = self._cause_limit or now + CAUSE_WAIT_S
            some_run = len(codes) < self._plan.nproc
            # The rank that is the cause is about to end, too.
            if not (some_run and now < self._cause_limit and follows_another(self._workers)):
                self.is_reported = True
                self._tell_failure(self._place, self._workers)
        elif len(codes) == self._plan.nproc:
            self._tell_finished(codes)
        elif any(codes.values()):
            # Some have stopped at the boundary, so the others are about to.
            self._give_up = self._give_up or now + self._plan.fault_policy.grace_s
            if now > self._give_up:
                self._workers.end(signal.SIGTERM, GRACE_S)
                self._tell_finished(codes)

    def _tell_left(self, codes: Mapping[int, int]) -> None:
        for local in sorted(codes.keys() - self._left):
            self._left.add(local)
            # Ranks that still run may wait for one that has left.
            if codes[local] == 0 and len(codes) < self._plan.nproc * self._place.machines:
                self._rendezvous.tell("left", round=self._place.number, rank=self._place.base_rank + local)

    def _tell_finished(self, codes: Mapping[int, int]) -> None:
        self.is_reported = True
        self._rendezvous.tell("finished", round=self._place.number, code=max(codes.values()))


def follows_another(workers: Workers) -> bool:
    """Return whether the failures so far only follow that of a rank that still runs."""
    return bool(first_failure(workers.failures()).own.get("consequence"))
