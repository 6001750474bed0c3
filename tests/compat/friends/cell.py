"""What the cells of trainers share: a table of them, tiny data, and a file of numbers and weights for each."""

from __future__ import annotations

import importlib
import math
import os
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState, PartialState

warnings.simplefilter("ignore")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

Result = tuple[list[dict[str, Any]], dict[str, torch.Tensor]]
"""Numbers that were logged, and whole weights."""

CELLS: dict[str, Callable[[Path], Result]] = {}
OUT = Path(os.environ.get("CELLS_OUT", "cells"))
WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(61))]


def cell(run: Callable[[Path], Result]) -> Callable[[Path], Result]:
    """A cell: trains in the folder that it is given."""
    CELLS[run.__name__] = run
    return run


def run(words: list[str]) -> None:
    """Run cells one after the other: ``trainer/plain``, ``trainer/plain/zero=3``. Their files are in ``CELLS_OUT``."""
    for word in words:
        module, name, *parallel = word.split("/")
        importlib.import_module(f"{module}_cells")
        os.environ.pop("LOCKSTEP_PARALLEL", None)
        if parallel:
            os.environ["LOCKSTEP_PARALLEL"] = parallel[0]
        AcceleratorState._reset_state(True)
        began = time.monotonic()
        folder = OUT / "-".join([name, *parallel])
        logged, weights = CELLS[name](folder)
        if PartialState().is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            whole = {key: value.detach().cpu().clone() for key, value in weights.items()}
            torch.save((numbers(logged), whole), folder / "result.pt")
            print(f"ran {word} in {time.monotonic() - began:.1f} s", flush=True)


def numbers(logged: list[dict[str, Any]]) -> list[dict[str, float]]:
    """What was logged, without what depends on the clock."""
    clocks = ("runtime", "per_second", "flos", "time", "memory")
    return [
        {
            key: float(value)
            for key, value in line.items()
            if isinstance(value, (int, float))
            and not math.isnan(value)
            and not any(clock in key for clock in clocks)
        }
        for line in logged
    ]


def quiet(trainer: Any) -> Any:
    """The same trainer, which does not print what it logs."""
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def trained(trainer: Any) -> Result:
    """What a Trainer has logged, and its weights."""
    return trainer.state.log_history, trainer.accelerator.get_state_dict(trainer.model)


def save_once(save: Callable[[], object]) -> None:
    """Call this on the main process, and let the others wait for it."""
    if PartialState().is_main_process:
        save()
    PartialState().wait_for_everyone()
    if torch.distributed.is_initialized():  # a state that was reset may not know of the group
        torch.distributed.barrier()


def sentences(count: int, shortest: int, longest: int, seed: int) -> list[str]:
    source = random.Random(seed)
    return [
        " ".join(source.choice(WORDS[3:]) for _ in range(source.randint(shortest, longest)))
        for _ in range(count)
    ]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    plain = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def gpt2(dropout: float = 0.1, **options: Any) -> Any:
    transformers.set_seed(0)
    return transformers.GPT2LMHeadModel(gpt2_config(dropout, **options))


def gpt2_config(dropout: float = 0.1, **options: Any) -> Any:
    return transformers.GPT2Config(
        vocab_size=64,
        n_positions=64,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
        **options,
    )
