"""What is learnt: prompts, and the ids that end and fill answers.

The small task is learnt in seconds: answer with words of the class of the prompt. Words are numbers. Odd ones are one
class, even ones the other. A prompt is 1 to 6 words of one class and the mark SEP; the answer follows. So prompts are
ragged, and what is right depends on the prompt.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

PAD, EOS, SEP, FIRST_WORD = 0, 1, 2, 3
VOCABULARY = 19  # 8 words of each class
LONGEST_PROMPT = 7


class SmallTask:
    """Prompts of the small task. The same for any number of processes, and after a resume."""

    pad, eos = PAD, EOS

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def prompts(self, iteration: int, count: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + iteration)
        made = []
        for _ in range(count):
            length = int(torch.randint(1, LONGEST_PROMPT, (), generator=generator))
            odd = int(torch.randint(2, (), generator=generator))
            words = torch.randint((VOCABULARY - FIRST_WORD) // 2, (length,), generator=generator)
            made.append([*(FIRST_WORD + 2 * words + (1 - odd)).tolist(), SEP])
        return made


class TextTask:
    """The lines of a file as prompts, in another order in each pass over the file."""

    def __init__(self, file: str, tokenizer: str, seed: int) -> None:
        self.lines = [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self.eos = self.tokenizer.eos_token_id
        self.pad = self.eos if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        self.seed = seed

    def prompts(self, iteration: int, count: int) -> list[list[int]]:
        made = []
        for place in range(iteration * count, (iteration + 1) * count):
            epoch, number = divmod(place, len(self.lines))
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            line = self.lines[int(torch.randperm(len(self.lines), generator=generator)[number])]
            made.append(self.ids(line))
        return made

    def ids(self, line: str) -> list[int]:
        if self.tokenizer.chat_template is None:
            return list(self.tokenizer(line)["input_ids"])
        turn = [{"role": "user", "content": line}]
        return list(self.tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"])


class WordScores(nn.Module):
    """A number for each word: +1 for odd ones, -1 for even ones, 0 for PAD, EOS and SEP."""

    def __init__(self) -> None:
        super().__init__()
        words = torch.arange(VOCABULARY)
        scores = torch.where(words < FIRST_WORD, 0.0, 2.0 * (words % 2) - 1)
        self.score = nn.Embedding.from_pretrained(scores[:, None])

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.score(ids).squeeze(-1).float()  # also where weights are gathered in 16 bits
        return scores


class KnownReward(nn.Module):
    """Stands for a trained reward model: (right words - wrong words) / length of an answer, at most 1.

    It is called as a sequence classifier of transformers is, and returns `logits` [rows, 1] as one does.
    """

    _no_split_modules = ("WordScores",)

    def __init__(self, answer_length: int) -> None:
        super().__init__()
        self.words = nn.ModuleList([WordScores()])
        self.answer_length = answer_length

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> SimpleNamespace:
        scores = self.words[0](input_ids) * attention_mask
        in_answer = (input_ids == SEP).cumsum(1) > 0
        wanted = (scores * ~in_answer).sum(1).sign()
        return SimpleNamespace(logits=(wanted * (scores * in_answer).sum(1) / self.answer_length)[:, None])
