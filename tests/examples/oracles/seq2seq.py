"""A T5 on whole batches; answers are generated one question after another, so that nothing is padded."""

from __future__ import annotations

from types import ModuleType

import torch
from torch.utils.data import DataLoader

from tests.examples.oracles.steps import step


def results(recipe: ModuleType, epochs: int, questions: int) -> list[float]:
    """Of each epoch: loss, share of right answers, digits an answer."""
    torch.manual_seed(0)
    to_train, to_validate = recipe.examples(questions, seed=1), recipe.examples(questions // 10, seed=2)
    train = DataLoader(to_train, 64, shuffle=True, collate_fn=recipe.collate)
    validation = DataLoader(to_validate, len(to_validate), collate_fn=recipe.collate)
    model = recipe.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for _ in range(epochs):
        model.train()
        for batch in train:
            step(model(**batch).loss, optimizer, clip=model.parameters())  # transformers' mean over tokens
        model.eval()
        (batch,) = validation
        with torch.no_grad():
            loss = model(**batch).loss.item()
            answers = [answer(recipe, model, question) for question, _ in to_validate]
        right = [mine == theirs for mine, (_, theirs) in zip(answers, to_validate, strict=True)]
        found += [loss, sum(right) / len(right), sum(map(len, answers)) / len(answers)]
    return found


def answer(recipe: ModuleType, model: torch.nn.Module, question: list[int]) -> list[int]:
    """The digits that are the most likely one after another, without a cache."""
    tokens = [recipe.PAD]
    while tokens[-1] != recipe.END and len(tokens) <= recipe.LONGEST + 1:
        output = model(
            input_ids=torch.tensor([[*question, recipe.END]]), decoder_input_ids=torch.tensor([tokens])
        )
        tokens.append(int(output.logits[0, -1].argmax()))
    return [token for token in tokens[1:] if token != recipe.END]
