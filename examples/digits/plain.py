"""An image classifier as a plain PyTorch loop: one process.

    python examples/digits/plain.py --epochs 10

`ddp.py` is the same training on several processes, written by hand; `accelerated.py` changes five lines.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from digits import classifier, datasets, evaluate


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step")
    args = parser.parse_args()

    torch.manual_seed(0)
    train_set, test_set = datasets()
    train = DataLoader(train_set, batch_size=args.batch_size, drop_last=True)
    test = DataLoader(test_set, batch_size=args.batch_size)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for _ in range(args.epochs):
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()

    print(evaluate(model, test))


if __name__ == "__main__":
    main()
