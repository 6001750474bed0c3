"""A GAN of plain torch: the gradients of each model by `torch.autograd.grad`, the losses by their formula."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader


def losses(recipe: ModuleType, epochs: int) -> list[float]:
    torch.manual_seed(0)
    generator, discriminator = recipe.new_generator(), recipe.new_discriminator()
    models = (discriminator, generator)
    rates = (1e-3, 2e-3)
    optimizers = [
        torch.optim.Adam(m.parameters(), rate, betas=(0.5, 0.999))
        for m, rate in zip(models, rates, strict=True)
    ]
    data, found = recipe.DigitsWithNoise(), []
    loader = DataLoader(data, 64, shuffle=True, drop_last=True)
    for epoch in range(epochs):
        data.set_epoch(epoch)
        of_epoch = []
        for real, noise in loader:
            fake = generator(noise)
            # -log sigmoid(x) = softplus(-x)
            for_real, for_fake = discriminator(real), discriminator(fake)
            of_discriminator = (F.softplus(-for_real).mean() + F.softplus(for_fake).mean()) / 2
            of_generator = F.softplus(-for_fake).mean()
            for model, loss in zip(models, (of_discriminator, of_generator), strict=True):
                parameters = list(model.parameters())
                gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
            for optimizer in optimizers:
                optimizer.step()
            of_epoch.append([of_discriminator.item(), of_generator.item()])
        found += torch.tensor(of_epoch).mean(0).tolist()
    return found
