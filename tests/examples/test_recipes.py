"""Each recipe prints the numbers of plain torch on one process, on any number of processes.

A row of RECIPES is a recipe, short arguments, and its oracle: a function in tests/examples/oracles, which is given the
module of the recipe and returns the numbers that the recipe prints. Recipes without one are compared with themselves on
one process.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from lockstep.testing.pool import WorkerPool
from tests.examples.oracles import (
    contrastive,
    distillation,
    ema,
    gan,
    long_context,
    masked_lm,
    mixture_of_experts,
    slow_links,
)
from tests.examples.scripts import EXAMPLES, Run, beside, numbers
from tests.marks import again

ROOT = EXAMPLES.parent
FOLDER = EXAMPLES / "recipes"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Recipe:
    """How a recipe is run here.

    Attributes:
        script: Its file in examples/recipes.
        arguments: For a run of a few seconds.
        oracle: Called with the recipe's module; returns what ``pattern`` finds in what the recipe prints.
        pattern: The numbers that are compared.
        tolerance: Of a number that differs, relative or absolute.
        is_exhaustive: Proves again what another row proves.
    """

    script: str
    arguments: tuple[object, ...] = ()
    oracle: Callable[[ModuleType], list[float]] | None = None
    pattern: str = "(?:loss|accuracy) NUMBER"
    tolerance: float = 2e-5
    is_exhaustive: bool = field(default=False, kw_only=True)

    def __str__(self) -> str:
        return " ".join(map(str, (self.script, *self.arguments)))


RECIPES = [
    Recipe(
        "masked_lm.py",
        ("--epochs", 2, "--windows", 500),
        partial(masked_lm.losses, epochs=2, windows=500),
    ),
    Recipe("contrastive.py", ("--epochs", 3), partial(contrastive.results, epochs=3), tolerance=2e-4),
    Recipe("gan.py", ("--epochs", 2), partial(gan.losses, epochs=2)),
    Recipe(
        "gan.py",
        ("--epochs", 2, "--accumulation", 2, "--batch-size", 32),
        partial(gan.losses, epochs=2),
    ),
    *(
        Recipe(
            "gan.py",
            ("--epochs", 2, "--accumulation", 2, "--batch-size", 32, "--parallel", parallel),
            partial(gan.losses, epochs=2),
            is_exhaustive=True,
        )
        for parallel in ("zero=2", "zero=3")
    ),
    Recipe(
        "distillation.py",
        ("--epochs", 2),
        partial(distillation.losses_and_accuracies, epochs=2),
        "(?:loss|right on) NUMBER",
    ),
    Recipe(
        "distillation.py",
        ("--epochs", 2, "--teacher", "zero=2", "--student", "zero=3"),
        partial(distillation.losses_and_accuracies, epochs=2),
        "(?:loss|right on) NUMBER",
        is_exhaustive=True,
    ),
    Recipe("ema.py", ("--epochs", 2), partial(ema.losses, epochs=2), "(?:loss|weights) NUMBER"),
    Recipe(
        "ema.py",
        ("--epochs", 2, "--parallel", "ddp", "--accumulation", 2, "--batch-size", 32),
        partial(ema.losses, epochs=2),
        "(?:loss|weights) NUMBER",
        is_exhaustive=True,
    ),
    Recipe(
        "long_context.py",
        ("--steps", 3, "--length", 256),
        partial(long_context.losses, steps=3, length=256),
    ),
    Recipe("mixture_of_experts.py", ("--epochs", 2), partial(mixture_of_experts.losses, epochs=2)),
    Recipe(
        "slow_links.py",
        ("--mode", "sync", "--steps", 6, "--every", 3),
        partial(slow_links.synchronous_losses, steps=6, every=3),
    ),
]
NOTHING_IS_TRAINED = {"batch_inference.py", "larger_than_memory.py"}  # test_recipes_more.py


def of_oracle(recipe: Recipe) -> list[float]:
    assert recipe.oracle is not None
    path = FOLDER / recipe.script
    with beside(path):
        return recipe.oracle(importlib.import_module(path.stem))


@pytest.fixture(scope="module")
def expected(worker_pool: WorkerPool, run: Run) -> Callable[[Recipe], list[float]]:
    """The numbers that a recipe must print, computed once."""
    known: dict[str, list[float]] = {}

    def find(recipe: Recipe) -> list[float]:
        if str(recipe) not in known:
            if recipe.oracle is not None:
                (known[str(recipe)],) = worker_pool.run(of_oracle, 1, recipe)
            else:
                text = run(1, f"recipes/{recipe.script}", *recipe.arguments)
                known[str(recipe)] = numbers(recipe.pattern, text)
        return known[str(recipe)]

    return find


def cases() -> list[Any]:
    """Recipes with an oracle on 1 and 2 processes, those without on 2; on 4 exhaustively."""
    found = []
    for recipe in RECIPES:
        for processes in (1, 2, 4):
            if processes > 1 or recipe.oracle is not None:
                is_again = recipe.is_exhaustive or processes == 4
                found.append((again if is_again else pytest.param)(recipe, processes))
    return found


@pytest.mark.parametrize(("recipe", "processes"), cases(), ids=str)
def test_a_recipe_prints_the_numbers_of_one_process(
    run: Run, expected: Callable[[Recipe], list[float]], recipe: Recipe, processes: int
) -> None:
    text = run(processes, f"recipes/{recipe.script}", *recipe.arguments)
    found = numbers(recipe.pattern, text)
    assert found, text
    assert found == pytest.approx(expected(recipe), rel=recipe.tolerance, abs=recipe.tolerance)


def help_of(script: str) -> str:
    """What ``--help`` prints."""
    import io
    import runpy
    import sys
    from contextlib import redirect_stdout, suppress

    sys.argv[:] = [script, "--help"]
    path = FOLDER / script
    with beside(path), redirect_stdout(io.StringIO()) as printed, suppress(SystemExit):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


def rows() -> dict[str, list[str]]:
    """The cells of each row of the README's table, by its script."""
    lines = [line.strip("| ").split(" | ") for line in README.splitlines() if line.startswith("| [")]
    return {re.findall(r"\]\(([^)]+)\)", cells[0])[0]: cells for cells in lines}


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_readme_show_how_a_recipe_is_run(worker_pool: WorkerPool, script: str) -> None:
    (text,) = worker_pool.run(help_of, 1, script)
    _, _, command, real = rows()[script]
    assert command.strip("`") in " ".join(text.split())
    assert f"examples/recipes/{script}" in command
    assert re.search(r"`[^`]+`", real), "the line for a real model"


def test_every_recipe_is_in_the_table_of_this_file() -> None:
    assert {recipe.script for recipe in RECIPES} == set(SCRIPTS) - NOTHING_IS_TRAINED


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_recipe_fits_one_sitting(script: str) -> None:
    assert len((FOLDER / script).read_text(encoding="utf-8").splitlines()) < 150
