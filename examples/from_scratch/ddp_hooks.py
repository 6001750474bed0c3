"""Data parallel training without a server: every process has the model, and they average each gradient.

    python examples/from_scratch/ddp_hooks.py

Backward computes the gradient of the last layer first. A hook sees each gradient as soon as it is there, and starts
its all-reduce. The network works while backward goes on with the layers before.

Paper: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from world import Check, batch, count, mean_loss, run, same, sgd, share, small_model, train_alone, wire


class DataParallel:
    """Averages the gradients of a model over all processes.

    Call :meth:`wait` between backward and step.
    """

    def __init__(self, model: nn.Module) -> None:
        self.running: list[dist.Work] = []
        self.parameters = list(model.parameters())
        for parameter in self.parameters:
            # Whatever each process drew at random, all start with the weights of
            # process 0.
            dist.broadcast(parameter.data, src=0)
            parameter.register_post_accumulate_grad_hook(self.start)

    def start(self, parameter: nn.Parameter) -> None:
        """Called in backward, when this parameter's gradient is complete."""
        # Divided before the sum: in 16-bit types the sum of many gradients could
        # overflow.
        parameter.grad /= dist.get_world_size()
        # async_op: the call returns at once, and the sum is there after wait().
        self.running.append(dist.all_reduce(parameter.grad, async_op=True))

    def wait(self) -> None:
        for work in self.running:
            work.wait()
        self.running.clear()


def train(steps: int = 3) -> list[Tensor]:
    """The trained parameters, the same on every process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = small_model()
    parallel = DataParallel(model)
    # Every process has an optimizer. Equal weights, equal gradients: they stay equal
    # without a further word.
    optimizer = sgd(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
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
    return [
        same("parameters, beside one process", trained, train_alone(steps)),
        count(
            "bytes sent in a step: 2 (N - 1) / N", sent.bytes // steps, 2 * (size - 1) / size * model_bytes
        ),
        count("all-reduces in a step: one a parameter", sent.messages // steps, len(trained)),
    ]


if __name__ == "__main__":
    run(demo, processes=4)
