"""The classifier of plain.py on any number of processes and devices: the five numbered lines are the change.

    lockstep launch --nproc 2 examples/digits/accelerated.py --epochs 10

It also runs as `python examples/digits/accelerated.py`, and prints the same numbers either way.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from digits import classifier, datasets, evaluate
from lockstep import Accelerator  # 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step")
    args = parser.parse_args()

    torch.manual_seed(0)
    accelerator = Accelerator(split_batches=True)  # 2: the processes share each batch
    train_set, test_set = datasets()
    train = DataLoader(train_set, batch_size=args.batch_size, drop_last=True)
    test = DataLoader(test_set, batch_size=args.batch_size)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)  # 3

    for _ in range(args.epochs):
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)  # 4
            optimizer.step()

    accelerator.print(evaluate(model, test, accelerator.gather_for_metrics))  # 5


if __name__ == "__main__":
    main()
