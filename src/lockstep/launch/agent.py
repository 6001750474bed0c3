"""torch's elastic agent with a bound on how long workers may take to end."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsSpecs


class BoundedAgent(LocalElasticAgent):
    """Ends its workers with the polite signal, then SIGKILL after ``grace_s`` (torch: always 30 s)."""

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs, grace_s: float) -> None:
        super().__init__(spec, logs_specs, log_line_prefix_template="[rank ${rank}] ")
        self._grace_s = grace_s
        self.failed_by_themselves: frozenset[int] | None = None
        """Local ranks that had failed before any was ended; None where torch does not tell."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ids: dict[int, Any] = super()._start_workers(worker_group)
        limit_grace(self._pcontext, self._grace_s, before=self._note_failed)
        return ids

    def _note_failed(self) -> None:
        failures = getattr(self._pcontext, "_failures", None)
        if failures and self.failed_by_themselves is None:
            self.failed_by_themselves = frozenset(failures)


def limit_grace(context: Any, grace_s: float, before: Callable[[], None]) -> None:
    """Bound the time of a process context's ``close``, whoever calls it; call ``before`` first."""
    if context is None:
        return
    close = context.close

    def bounded_close(death_sig: signal.Signals | None = None, timeout: float = 30) -> None:
        before()
        close(death_sig, min(timeout, grace_s))

    context.close = bounded_close
