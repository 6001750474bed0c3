"""torch's elastic agent with a bound on how long workers may take to end."""

from __future__ import annotations

import signal
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsSpecs


class BoundedAgent(LocalElasticAgent):
    """Ends its workers with the polite signal, then SIGKILL after ``grace_s`` (torch: always 30 s)."""

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs, grace_s: float) -> None:
        super().__init__(spec, logs_specs)
        self._grace_s = grace_s

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ids: dict[int, Any] = super()._start_workers(worker_group)
        limit_grace(self._pcontext, self._grace_s)
        return ids


def limit_grace(context: Any, grace_s: float) -> None:
    """Bound the time of a process context's ``close``, whoever calls it and with what timeout."""
    if context is None:
        return
    close = context.close

    def bounded_close(death_sig: signal.Signals | None = None, timeout: float = 30) -> None:
        close(death_sig, min(timeout, grace_s))

    context.close = bounded_close
