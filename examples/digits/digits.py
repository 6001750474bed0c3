"""What the three scripts share: 8x8 images of handwritten digits, a small network, the evaluation."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """1437 training and 360 test images. The split shuffles them, once and always alike, so that the three
    scripts see one order and can be compared to the last digit."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
    x_train, x_test, y_train, y_test = map(torch.as_tensor, parts)
    return TensorDataset(x_train.float(), y_train), TensorDataset(x_test.float(), y_test)


def classifier() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),  # 64 values to one channel of 8x8
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: DataLoader, gather: Callable[[Tensor], Tensor] = lambda values: values
) -> str:
    """Mean loss and accuracy. `gather` collects a batch's per-image results from all processes."""
    model.eval()
    results = []
    for images, labels in loader:
        logits = model(images)
        losses = F.cross_entropy(logits, labels, reduction="none")
        results.append(gather(torch.stack([losses, (logits.argmax(1) == labels).float()], dim=1)))
    loss, accuracy = torch.cat(results).double().mean(0).tolist()
    return f"test loss {loss:.6f}, accuracy {accuracy:.4f} on {len(torch.cat(results))} images"
