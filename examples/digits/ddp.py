"""The classifier of plain.py on several processes, written by hand with DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/digits/ddp.py --epochs 10

Compare with `accelerated.py`, which does the same.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from digits import classifier, datasets


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step, over all processes")
    args = parser.parse_args()

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.batch_size % world_size:
        raise SystemExit(f"--batch-size {args.batch_size} is not divisible by {world_size} processes")

    torch.manual_seed(0)
    train_set, test_set = datasets()
    sampler = DistributedSampler(train_set, shuffle=False)
    batch_size = args.batch_size // world_size
    train_loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler, drop_last=True)
    # A sampler would pad the test set to a multiple of the world size and count some images twice.
    test_loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)), batch_size=batch_size)
    model = DistributedDataParallel(classifier().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()

    # Ranks may have unequally many test batches: the bare module, without DDP's collectives, and one sum.
    module = model.module.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    with torch.no_grad():
        for images, labels in test_loader:
            images, labels = images.to(device), labels.to(device)
            logits = module(images)
            totals[0] += F.cross_entropy(logits, labels, reduction="sum")
            totals[1] += (logits.argmax(1) == labels).sum()
            totals[2] += len(labels)
    dist.all_reduce(totals)
    loss, accuracy, count = totals[0] / totals[2], totals[1] / totals[2], int(totals[2])
    if rank == 0:
        print(f"test loss {loss:.6f}, accuracy {accuracy:.4f} on {count} images")
    dist.barrier()  # gloo's threads may abort the interpreter's exit while they hold the sum's tensor
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
