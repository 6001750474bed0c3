"""What the recipes train on: text and images that every machine has. Nothing is downloaded."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1] / "gpt"))
import corpus

Windows = corpus.Windows


def text_windows(length: int, training: int, validation: int) -> tuple[Windows, Windows]:
    """Windows of ``length`` bytes [length] of Python's standard library: so many to train on, so many held out."""
    first, second = corpus.load()
    return Windows(first, length - 1, training), Windows(second, length - 1, validation)


def digit_images() -> tuple[TensorDataset, TensorDataset]:
    """1437 training and 360 test images of handwritten digits, [1, 8, 8] from 0 to 1, with their labels."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
    x_train, x_test, y_train, y_test = map(torch.as_tensor, parts)
    shape, dtype = (-1, 1, 8, 8), torch.get_default_dtype()
    return (
        TensorDataset(x_train.to(dtype).view(shape), y_train),
        TensorDataset(x_test.to(dtype).view(shape), y_test),
    )
