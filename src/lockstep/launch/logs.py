"""Where the output of each rank goes: the console, or ``rank-N.out`` and ``rank-N.err`` in a directory."""

from __future__ import annotations

import os

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, Std


class RankLogs(LogsSpecs):
    """Names files by global rank, and by ``round`` after a restart. ``tee`` shows the lines on the console as well."""

    def __init__(self, work_dir: str, log_dir: str | None = None, tee: bool = False) -> None:
        std = Std.ALL if log_dir else Std.NONE
        super().__init__(log_dir or work_dir, redirects=std, tee=std if tee else Std.NONE)
        self._work_dir = work_dir
        self._log_dir = log_dir
        self.tee = tee
        self.round = 0
        self.stderr_of: dict[int, str] = {}

    @property
    def root_log_dir(self) -> str:
        return self._log_dir or self._work_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Destinations by local rank; also tells each worker its error file."""
        destination = LogsDest()
        suffix = f".restart-{self.round}" if self.round else ""  # what was written before stays
        for local_rank, environment in envs.items():
            rank = environment["RANK"]
            error_file = os.path.join(self._work_dir, f"rank-{rank}{suffix}.error.json")
            environment["TORCHELASTIC_ERROR_FILE"] = error_file
            destination.error_files[local_rank] = error_file
            out = err = ""  # torch's word for the console
            if self._log_dir:
                out = os.path.join(self._log_dir, f"rank-{rank}{suffix}.out")
                err = os.path.join(self._log_dir, f"rank-{rank}{suffix}.err")
                self.stderr_of[local_rank] = err
            destination.stdouts[local_rank], destination.stderrs[local_rank] = out, err
            if self.tee:
                destination.tee_stdouts[local_rank], destination.tee_stderrs[local_rank] = out, err
        return destination
