"""Data parallel training with a parameter server: one process keeps the weights, the others compute gradients.

    python examples/from_scratch/parameter_server.py

Each step, the server sends its weights to all workers. A worker computes the gradient of its part of the batch
and sends it back. The server averages the gradients and steps.

Paper: Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from world import Check, batch, count, mean_loss, run, same, sgd, share, small_model, train_alone, wire

SERVER = 0


def serve(steps: int) -> list[Tensor]:
    """The server's side. Returns the trained parameters."""
    model = small_model()
    optimizer = sgd(model.parameters())
    workers = range(1, dist.get_world_size())
    for _ in range(steps):
        weights = parameters_to_vector(model.parameters()).detach()
        for worker in workers:
            dist.send(weights, worker)

        total = torch.zeros_like(weights)
        gradient = torch.empty_like(weights)
        for worker in workers:
            dist.recv(gradient, worker)
            total += gradient

        # Each worker's loss is the mean of equally many rows, so their mean is that of
        # the whole batch.
        set_gradients(model, total / len(workers))
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def work(steps: int) -> None:
    """A worker's side.

    It keeps nothing from one step to the next: no optimizer, no weights of its own.
    """
    model = small_model()
    index, workers = dist.get_rank() - 1, dist.get_world_size() - 1
    weights = torch.empty_like(parameters_to_vector(model.parameters()))
    for step in range(steps):
        dist.recv(weights, SERVER)
        vector_to_parameters(weights, model.parameters())

        model.zero_grad()
        inputs, targets = batch(step)
        mean_loss(model, share(inputs, index, workers), share(targets, index, workers)).backward()
        dist.send(parameters_to_vector(parameter.grad for parameter in model.parameters()), SERVER)


def set_gradients(model: torch.nn.Module, flat: Tensor) -> None:
    """Give each parameter its piece of one long gradient."""
    parameters = list(model.parameters())
    pieces = flat.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)


def train(steps: int = 3) -> list[Tensor]:
    """The trained parameters on the server, an empty list on the workers."""
    if dist.get_rank() == SERVER:
        return serve(steps)
    work(steps)
    return []


def demo(steps: int = 3) -> list[Check]:
    with wire() as sent:
        trained = train(steps)

    model_bytes = 4 * sum(parameter.numel() for parameter in small_model().parameters())
    workers = dist.get_world_size() - 1
    if dist.get_rank() != SERVER:
        return [count("bytes that a worker sends in a step", sent.bytes // steps, model_bytes)]
    return [
        same("parameters, beside one process", trained, train_alone(steps)),
        count("bytes that the server sends in a step", sent.bytes // steps, workers * model_bytes),
    ]


if __name__ == "__main__":
    run(demo, processes=4)
