"""What ``check.py`` has checked: a plain loop of one of several models; see there."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import Accelerator

VOCABULARY, LENGTH, WIDTH, IMAGE, CLASSES = 96, 16, 32, 16, 7


class ConvNet(nn.Module):
    """Convolutions with batch normalisation, ReLU and maximum pooling, as torchvision's."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, CLASSES))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.classifier(self.features(pixel_values)), labels)}


class Recurrent(nn.Module):
    """Two layers of LSTM with dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.lstm(self.embed(input_ids))[0])
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


class Perceptron(nn.Module):
    """Residual blocks of linear layers, ReLU and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3 * IMAGE * IMAGE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.enter(pixel_values.flatten(1))
        for block in self.blocks:
            x = block(x)
        return {"loss": F.cross_entropy(self.head(x), labels)}


class Residual(nn.Module):
    """Two residual blocks of convolutions with batch normalisation, as ResNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1, bias=False)
        self.layers = nn.ModuleList(Bottleneck(12) for _ in range(2))
        self.fc = nn.Linear(12, CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.stem(pixel_values)
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.fc(x.mean((2, 3))), labels)}


class Bottleneck(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class Encoder(nn.Module):
    """torch's own transformer layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.encoder(self.embed(input_ids) + self.positions))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.relu(self.up(self.norm(x)))))


def transformer(name: str, width: int = WIDTH, layers: int = 2, vocabulary: int = VOCABULARY) -> nn.Module:
    """A model of transformers, from a small configuration."""
    import transformers as t

    like_llama: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max(LENGTH, 256),
        "attention_dropout": 0.1,
        "use_cache": False,
    }
    like_bert: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 2 * width,
    }
    moe = {"output_router_logits": True, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}
    if name == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**like_llama))
    if name == "gpt2":
        return t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=4, n_positions=LENGTH)
        )
    if name == "t5":
        return t.T5ForConditionalGeneration(
            t.T5Config(
                vocab_size=vocabulary,
                d_model=width,
                d_kv=8,
                d_ff=2 * width,
                num_layers=layers,
                num_heads=4,
                decoder_start_token_id=0,
            )
        )
    if name == "bert":
        return t.BertForMaskedLM(
            t.BertConfig(vocab_size=vocabulary, max_position_embeddings=LENGTH, **like_bert)
        )
    if name == "gpt_neox":
        sizes = {"vocab_size": vocabulary, "hidden_dropout": 0.1, "max_position_embeddings": LENGTH}
        return t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**sizes, **like_bert))
    if name == "mixtral":
        return t.MixtralForCausalLM(t.MixtralConfig(**like_llama, **moe, num_local_experts=4))
    if name == "qwen2_moe":
        sizes = {"moe_intermediate_size": width, "shared_expert_intermediate_size": width}
        return t.Qwen2MoeForCausalLM(t.Qwen2MoeConfig(**like_llama, **moe, **sizes, num_experts=4))
    return t.ViTForImageClassification(
        t.ViTConfig(image_size=IMAGE, patch_size=4, num_labels=CLASSES, hidden_dropout_prob=0.1, **like_bert)
    )


OWN = {"cnn": ConvNet, "resnet": Residual, "lstm": Recurrent, "mlp": Perceptron, "encoder": Encoder}
TRANSFORMERS = ("llama", "gpt2", "gpt_neox", "t5", "bert", "mixtral", "qwen2_moe", "vit")
OF_IMAGES = ("cnn", "resnet", "mlp", "vit")


def samples(
    name: str, count: int, length: int = LENGTH, vocabulary: int = VOCABULARY, seed: int = 11
) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    if name in OF_IMAGES:
        images = torch.randn(count, 3, IMAGE, IMAGE, generator=generator)
        classes = torch.randint(CLASSES, (count,), generator=generator)
        return [{"pixel_values": x, "labels": y} for x, y in zip(images, classes, strict=True)]
    tokens = torch.randint(1, vocabulary, (count, length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.05)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return torch.optim.Adafactor(parameters, lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=[*OWN, *TRANSFORMERS])
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument(
        "--size", type=int, nargs=3, default=[WIDTH, 2, VOCABULARY], help="width, layers, tokens"
    )
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=5, help="of weights and data")
    parser.add_argument(
        "--times",
        help="add a line for each step to this file: process, when it began, and the peak of memory",
    )
    chosen = parser.parse_args()
    torch.manual_seed(chosen.seed)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=chosen.accumulation)
    model = OWN[chosen.model]() if chosen.model in OWN else transformer(chosen.model, *chosen.size)
    optimizer = optimizer_of(chosen.optimizer, model.parameters())
    found = samples(chosen.model, 64 * chosen.batch_size, chosen.length, chosen.size[2], 6 + chosen.seed)
    loader = DataLoader(found, batch_size=chosen.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model.train(), optimizer, loader)
    for batch in itertools.islice(loader, chosen.steps):
        if chosen.times and accelerator.is_main_process:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with open(chosen.times, "a") as file:
                file.write(json.dumps([os.getpid(), time.monotonic(), peak * 1024]) + "\n")
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if chosen.clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), chosen.clip)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
