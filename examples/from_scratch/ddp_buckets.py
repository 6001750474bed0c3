"""Data parallel training with buckets: gradients travel together, in fewer and larger messages.

    python examples/from_scratch/ddp_buckets.py

A message has a price of its own, whatever its size, and a model has many small parameters. So gradients are written
into flat buffers, the buckets. A bucket's all-reduce starts when the last of its gradients is there.

Paper: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from world import Check, batch, count, mean_loss, run, same, sgd, share, small_model, train_alone, wire


class Bucket:
    """Gradients of some parameters in one flat buffer."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = len(parameters)
        self.buffer = torch.zeros(sum(parameter.numel() for parameter in parameters))
        pieces = self.buffer.split([parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            # The gradient is a view of the buffer: backward writes into it, and nothing
            # is copied.
            parameter.grad = piece.view_as(parameter)


class BucketedDataParallel:
    """Averages gradients over all processes, bucket by bucket.

    Call :meth:`wait` between backward and step.
    """

    def __init__(self, model: nn.Module, bucket_bytes: int) -> None:
        self.buckets = [Bucket(group) for group in grouped(list(model.parameters()), bucket_bytes)]
        self.next = 0
        self.running: list[dist.Work] = []
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                dist.broadcast(parameter.data, src=0)
                parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self.arrived(bucket))

    def arrived(self, bucket: Bucket) -> None:
        """Called in backward, when one more gradient of the bucket is there."""
        bucket.missing -= 1
        # In the order of the list, even if a later bucket is full first. All processes
        # must issue the same all-reduces in the same order, or one process's first
        # bucket would meet another's second.
        while self.next < len(self.buckets) and self.buckets[self.next].missing == 0:
            buffer = self.buckets[self.next].buffer
            buffer /= dist.get_world_size()
            self.running.append(dist.all_reduce(buffer, async_op=True))
            self.next += 1

    def wait(self) -> None:
        """Wait for all buckets, and make ready for the next backward."""
        for work in self.running:
            work.wait()
        self.running.clear()
        self.next = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    def zero_grad(self) -> None:
        """In place of the optimizer's, which would let go of the views."""
        for bucket in self.buckets:
            bucket.buffer.zero_()


def grouped(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Parameters in groups of at most that size, last ones first, as backward comes to them."""
    groups: list[list[nn.Parameter]] = [[]]
    for parameter in reversed(parameters):
        filled = sum(other.nbytes for other in groups[-1])
        if groups[-1] and filled + parameter.nbytes > bucket_bytes:
            groups.append([])
        groups[-1].append(parameter)
    return groups


def train(steps: int = 3, bucket_bytes: int = 1500) -> list[Tensor]:
    """The trained parameters, the same on every process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = small_model()
    parallel = BucketedDataParallel(model, bucket_bytes)
    optimizer = sgd(model.parameters())
    for step in range(steps):
        parallel.zero_grad()
        inputs, targets = batch(step)
        mean_loss(model, share(inputs, rank, size), share(targets, rank, size)).backward()
        parallel.wait()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def demo(steps: int = 3) -> list[Check]:
    with wire() as sent:
        trained = train(steps)

    size = dist.get_world_size()
    model_bytes = 4 * sum(parameter.numel() for parameter in trained)
    # From the back: 4 + 64 + 16 + 256 + 16 numbers are 1424 bytes; the first weight,
    # 512 bytes, does not fit in.
    return [
        same("parameters, beside one process", trained, train_alone(steps)),
        count(
            "bytes sent in a step: 2 (N - 1) / N", sent.bytes // steps, 2 * (size - 1) / size * model_bytes
        ),
        count("all-reduces in a step: one a bucket", sent.messages // steps, 2),
    ]


if __name__ == "__main__":
    run(demo, processes=4)
