"""A classifier of images on whole batches, with torch's own batch normalisation, in a loop of plain torch."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader


def results(recipe: ModuleType, model: str, epochs: int) -> list[float]:
    """Of each epoch training loss, test loss and accuracy."""
    torch.manual_seed(0)
    training, test = recipe.digit_images()
    train, validation = DataLoader(training, 64, shuffle=True, drop_last=True), DataLoader(test, len(test))
    make_model, make_optimizer, _ = recipe.MODELS[model]
    net = make_model()
    optimizer = make_optimizer(net.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(train))
    found = []
    for _ in range(epochs):
        net.train()
        losses = []
        for images, labels in train:
            loss = F.cross_entropy(net(images), labels, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        net.eval()
        ((images, labels),) = validation
        with torch.no_grad():
            logits = net(images)
        accuracy = (logits.argmax(1) == labels).double().mean()
        found += [sum(losses) / len(losses), F.cross_entropy(logits, labels).item(), accuracy.item()]
    return found
