"""Small models as `make` functions: what a user's own test would hand to `check_parity`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lockstep.nn import MixtureOfExperts

WIDTH, CLASSES, ROWS, LENGTH, VOCABULARY = 16, 10, 4, 8, 64
BATCHES = 8
Made = tuple[nn.Module, torch.optim.Optimizer, list[Any], Any]


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def made(model: nn.Module, shape: tuple[int, ...], labels: tuple[int, ...] = (ROWS,)) -> Made:
    batches = [(torch.randn(shape), torch.randint(CLASSES, labels)) for _ in range(BATCHES)]
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), batches, cross_entropy


def mlp() -> Made:
    layers = [nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES)]
    return made(nn.Sequential(*layers), (ROWS, WIDTH))


def mlp_adafactor() -> Made:
    model, _, batches, loss = mlp()
    return model, torch.optim.Adafactor(model.parameters(), lr=1e-2), batches, loss


def of_loader(workers: int = 0) -> Any:
    """Drawn in another order each epoch, from a dataset whose items are rows."""
    model, optimizer, batches, loss = mlp()
    rows = TensorDataset(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))
    loader = DataLoader(rows, batch_size=ROWS, shuffle=True, num_workers=workers)
    return model, optimizer, loader, loss


def cnn() -> Made:
    """BatchNorm has buffers and ranks that see other rows; dropout draws."""
    layers = [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(16, CLASSES),
    ]
    return made(nn.Sequential(*layers), (ROWS, 3, 8, 8))


class MovingScale(nn.Module):
    """Its forward uses buffers, which it moves by each batch; one of them is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("shift", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x * self.scale + self.shift)
        with torch.no_grad():
            self.scale = 0.9 * self.scale + 0.1 * y.mean(0)
            self.shift.mul_(0.9).add_(0.1 * y.std(0))
        return y


def moving_scale() -> Made:
    layers = [nn.Linear(WIDTH, WIDTH), MovingScale(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)]
    return made(nn.Sequential(*layers), (ROWS, WIDTH))


class Mixture(nn.Module):
    """Its router has a loss of the tokens of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = MixtureOfExperts(WIDTH, 24, num_experts=4)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.experts(x))


def mixture() -> Made:
    return made(Mixture(), (ROWS, LENGTH, WIDTH), (ROWS, LENGTH))


def balanced(which: Callable[[nn.Module], Tensor]) -> Made:
    """``which``: of the losses of a mixture."""
    model, optimizer, batches, _ = mixture()
    return model, optimizer, batches, partial(with_loss_of_experts, which)


def with_loss_of_experts(
    which: Callable[[nn.Module], Tensor], model: nn.Module, batch: tuple[Tensor, Tensor]
) -> Tensor:
    return cross_entropy(model, batch) + 0.1 * which(model)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 24, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def lstm() -> Made:
    return made(Recurrent(), (ROWS, LENGTH, WIDTH), (ROWS, LENGTH))


def texts() -> list[dict[str, Tensor]]:
    rows = [torch.randint(VOCABULARY, (ROWS, LENGTH)) for _ in range(BATCHES)]
    return [{"input_ids": ids, "labels": ids.clone()} for ids in rows]


def of_transformers(model: nn.Module) -> Made:
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), texts(), None


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def llama() -> Made:
    import transformers

    return of_transformers(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)))


def mixtral() -> Made:
    import transformers

    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    return of_transformers(transformers.MixtralForCausalLM(config))


def t5() -> Made:
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=1,
        num_decoder_layers=1,
        num_heads=4,
        decoder_start_token_id=0,
        dropout_rate=0.1,
    )
    return of_transformers(transformers.T5ForConditionalGeneration(config))


MODELS: dict[str, Callable[[], Made]] = {
    "mlp": mlp,
    "mlp_adafactor": mlp_adafactor,
    "cnn": cnn,
    "lstm": lstm,
    "llama": llama,
    "mixtral": mixtral,
    "t5": t5,
}
