"""Rounds of messages between ranks that are not in step: ranks take turns as the server that adds them up.

In round t the server is rank t mod N. The others send it their message and go on. When all have arrived, it adds them
up in the order of ranks, and sends the sum back. One thread on each rank does this, one round after the other, so that
a server answers while it computes.

No rank waits for ever: posting a round waits for nobody, and of the rounds that some thread has not carried yet, the
first needs only that every rank posts it, since all threads have carried those before it. Between two ranks, messages
to servers are posted in the order of rounds, and so are sums from them, each kind over a group of its own: backends
without tags, such as NCCL, pair them up right.

A message has the gradients, and where each rank is.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial, reduce
from queue import SimpleQueue

import torch
import torch.distributed as dist

from lockstep.errors import UsageError
from lockstep.runtime.process import THREADS_LET_GO_S, Runtime

Works = list[dist.Work | None]
"""None is for ranks that are not in the group."""


class MessageWord(IntEnum):
    """What a rank says of itself."""

    RUNNING = 0
    ENDED = 1
    FAILED = 2


@dataclass(frozen=True)
class Total:
    """The sum of all ranks' messages of a round.

    ``gradients`` (n,) are the sums of all parameters' gradients, one after the other; ``present`` tells of each
    parameter whether some rank had one; ``words`` and ``staleness`` are what each rank said.
    """

    gradients: torch.Tensor
    present: list[bool]
    words: list[MessageWord]
    staleness: list[int]


class MessageFormat:
    """``[gradients | one number a parameter: is there a gradient | word of each rank | staleness of each rank]``

    Each rank fills its own places in the last two with numbers and the others' with zeros, so that one sum over the
    ranks brings everything together. Numbers are fp32, or what is wider among the parameters.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], runtime: Runtime) -> None:
        self.parameters = list(parameters)
        # Messages lie with the gradients, or in host memory if the backend carries only that.
        backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
        on_host = backends.get(runtime.device.type, "gloo") == "gloo"
        self.device = torch.device("cpu") if on_host else runtime.device
        self.dtype = reduce(torch.promote_types, (p.dtype for p in self.parameters), torch.float32)
        self._sizes = [p.numel() for p in self.parameters]
        self._rank, self._world_size = runtime.rank, runtime.world_size
        # What stands behind the gradients: a flag for each parameter, a word and a staleness for each rank.
        self._numbers = len(self._sizes) + 2 * self._world_size

    def empty(self) -> torch.Tensor:
        """Memory for one message."""
        return torch.empty(sum(self._sizes) + self._numbers, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def pack(
        self, word: MessageWord, gradients: Sequence[torch.Tensor | None] = (), staleness: int = 0
    ) -> torch.Tensor:
        """Return this rank's message [numel]; the gradients, of all parameters or of none, of their shapes, are copied.

        Raises:
            UsageError: a gradient is sparse.
        """
        gradients = gradients or [None] * len(self._sizes)
        message = self.empty()
        *parts, numbers = message.split([*self._sizes, self._numbers])
        for part, gradient in zip(parts, gradients, strict=True):
            if gradient is None:
                part.zero_()
            elif gradient.layout is not torch.strided:
                raise UsageError(
                    f"A gradient of shape {tuple(gradient.shape)} is sparse, but late gradients are sent as "
                    "dense tensors. Make the embedding with sparse=False."
                )
            else:
                part.copy_(gradient.reshape(-1))
        present = [int(gradient is not None) for gradient in gradients]
        words, ages = [0] * self._world_size, [0] * self._world_size
        words[self._rank], ages[self._rank] = word, staleness
        numbers.copy_(torch.tensor([*present, *words, *ages], dtype=self.dtype))
        return message

    def read(self, total: torch.Tensor) -> Total:
        """Return the sum [numel] of all ranks' messages, taken apart; on an accelerator it must be ready."""
        gradients, numbers = total.split([sum(self._sizes), self._numbers])
        ranks = self._world_size
        values = [int(number) for number in numbers.tolist()]
        words = [MessageWord(word) for word in values[-2 * ranks : -ranks]]
        return Total(gradients, [count > 0 for count in values[: -2 * ranks]], words, values[-ranks:])

    @torch.no_grad()
    def means(self, total: Total) -> list[torch.Tensor | None]:
        """Return the mean gradient of each parameter, in memory of its own; None where no rank had one."""
        mean = total.gradients / self._world_size
        return [
            part.view(parameter.shape).to(device=parameter.device, dtype=parameter.dtype) if there else None
            for part, parameter, there in zip(
                mean.split(self._sizes), self.parameters, total.present, strict=True
            )
        ]


class Rounds:
    """Carries rounds until one in which some rank has ended or failed. Building it is collective.

    ``post`` and ``take`` are for the thread that trains. ``counts`` has ``waits``, and the bytes that this rank has
    ``sent`` as a client and ``answered`` as a server.
    """

    def __init__(self, runtime: Runtime, form: MessageFormat, counts: Counter[str]) -> None:
        # Each key is written by one thread.
        self._counts = counts
        self._rank, self._world_size = runtime.rank, runtime.world_size
        self._others = [rank for rank in range(runtime.world_size) if rank != runtime.rank]
        self._form = form
        self._posted = 0
        self._to_server, self._from_server = dist.new_group(), dist.new_group()
        # What the thread does in each round that was posted, and what came of it.
        self._todo: SimpleQueue[Callable[[], torch.Tensor]] = SimpleQueue()
        self._done: SimpleQueue[Total | BaseException] = SimpleQueue()
        self._answers: deque[tuple[Works, torch.Tensor]] = deque()
        self._lane = torch.Stream(form.device) if form.device.type != "cpu" else None
        self._thread = threading.Thread(target=self._run, name="lockstep-rounds", daemon=True)
        self._thread.start()

    def post(self, message: torch.Tensor) -> None:
        """Begin the next round with this rank's message [numel], which from now on belongs to the round."""
        number, self._posted = self._posted, self._posted + 1
        server = number % self._world_size
        if server == self._rank:
            inbox = {rank: self._form.empty() for rank in self._others}
            works = [
                dist.irecv(part, rank, group=self._to_server, tag=number) for rank, part in inbox.items()
            ]
            # The thread of rounds adds in another stream, which must wait until this message is packed.
            packed = None
            if self._lane is not None:
                packed = torch.accelerator.current_stream(self._form.device).record_event()
            inbox[self._rank] = message
            self._todo.put(partial(self._serve, number, inbox, works, packed))
        else:
            sent = dist.isend(message, server, group=self._to_server, tag=number)
            self._counts["sent"] += message.nbytes
            self._todo.put(partial(self._receive, number, server, message, sent))

    def take(self, wait: bool) -> Total | None:
        """Return the sum of the next round; None if it has not come and we do not ``wait`` for it.

        Raises:
            BaseException: what broke the connection to the others.
        """
        if self._done.empty():
            if not wait:
                return None
            self._counts["waits"] += 1
        found = self._done.get()
        if isinstance(found, BaseException):
            raise found
        # Its memory must not be given away before we have read it.
        if self._lane is not None:
            found.gradients.record_stream(torch.accelerator.current_stream(self._form.device))
        return found

    def close(self, limit_s: float | None = None) -> None:
        """Wait until the last round is carried, and leave the groups.

        After ``limit_s`` seconds the thread is left at its work, which may still bring others the last message.
        """
        self._thread.join(limit_s)
        if self._thread.is_alive():
            return
        groups = self._to_server, self._from_server
        for group in groups:
            dist.destroy_process_group(group)
        # As when the main group is left: the backend's threads must not have the last hold on a group.
        time.sleep(THREADS_LET_GO_S)
        del groups

    # In the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            # Waiting for others must not hold up the stream that computes.
            if self._lane is not None:
                torch.accelerator.set_device_index(self._form.device.index)
                torch.accelerator.set_stream(self._lane)
            while True:
                total = self._todo.get()()
                if self._lane is not None:
                    self._lane.synchronize()
                found = self._form.read(total)
                self._done.put(found)
                if any(word is not MessageWord.RUNNING for word in found.words):
                    break
            for sends, _ in self._answers:
                _wait_for(sends)
        except BaseException as error:
            self._done.put(error)
        finally:
            self._answers.clear()

    def _serve(
        self, number: int, inbox: dict[int, torch.Tensor], works: Works, packed: torch.Event | None
    ) -> torch.Tensor:
        """Add up all ranks' messages of a round, and send the others the sum."""
        _wait_for(works)
        if self._lane is not None and packed is not None:
            self._lane.wait_event(packed)
        # In the order of the ranks, so that a sum has the same bits whichever rank is the server.
        total = inbox[0]
        for rank in range(1, self._world_size):
            total += inbox[rank]
        sends = [dist.isend(total, rank, group=self._from_server, tag=number) for rank in self._others]
        self._counts["answered"] += total.nbytes * len(sends)
        # The sum must not change before all have it.
        self._answers.append((sends, total))
        while self._answers and all(work is None or work.is_completed() for work in self._answers[0][0]):
            self._answers.popleft()
        return total

    def _receive(
        self, number: int, server: int, _message: torch.Tensor, sent: dist.Work | None
    ) -> torch.Tensor:
        """Return the sum of a round from its server; until then the message is kept that was sent there."""
        total = self._form.empty()
        _wait_for([dist.irecv(total, server, group=self._from_server, tag=number)])
        # The sum has come, and so the server has this rank's message: its request only ends here.
        _wait_for([sent])
        return total


def _wait_for(works: Works) -> None:
    for work in works:
        assert work is not None
        work.wait()
