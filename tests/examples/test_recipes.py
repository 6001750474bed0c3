"""Each recipe prints the numbers of plain torch on one process, on any number of processes.

A row of RECIPES is a recipe, short arguments, and its oracle: a function in tests/examples/oracles, which is given the
module of the recipe and returns the numbers that the recipe prints. Recipes without one are compared with themselves on
one process.
"""

from __future__ import annotations

import importlib
import io
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open

from lockstep.testing import WorkerPool
from tests.examples.oracles import (
    bf16,
    contrastive,
    distillation,
    ema,
    gan,
    gpt,
    image_classifier,
    long_context,
    lora,
    masked_lm,
    mixture_of_experts,
    seq2seq,
    slow_links,
)
from tests.examples.printed import assert_as_recorded, is_recorded
from tests.examples.scripts import EXAMPLES, LOCKSTEP, Run, beside, matches, numbers
from tests.marks import again

FOLDER = EXAMPLES / "recipes"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
CHECK = [LOCKSTEP[0], "check", "--nproc", "2"]
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


OUT = "a folder of the test"


@dataclass(frozen=True)
class Recipe:
    """How a recipe is run here.

    Attributes:
        script: Its file, from examples/recipes.
        arguments: For a run of a few seconds; a folder of the test in place of OUT.
        oracle: Called with the recipe's module; returns what ``pattern`` finds in what the recipe prints.
        pattern: The numbers that are compared.
        tolerance: Of each number, relative or absolute; accuracies are printed with 4 digits.
        quick: On how many processes it runs in `make test`; on the others of 1, 2 and 4 exhaustively.
        check: What `lockstep check` says of it, where it is asked.
        parallel: What `lockstep check` is told of how the ranks spread the model; None: the script says it.
        dtype: Of all its floating-point numbers: float64 where training makes differences of rounding grow.
        bf16: How far its losses in bf16 may be from those of plain torch in bf16, on one process and on several.
    """

    script: str
    arguments: tuple[object, ...] = ()
    oracle: Callable[[ModuleType], list[float]] | None = None
    pattern: str = "(?:loss|accuracy) NUMBER"
    tolerance: float = 6e-5
    quick: tuple[int, ...] = (1, 2)
    check: str | None = None
    parallel: str | None = None
    dtype: str = "float32"
    bf16: tuple[float, float] = (6e-5, 5e-4)

    def __str__(self) -> str:
        return " ".join(map(str, (self.script, *self.arguments)))

    def words(self, folder: Path) -> list[str]:
        return [str(folder if argument is OUT else argument) for argument in self.arguments]

    @property
    def path(self) -> str:
        """Below ``examples``."""
        return (FOLDER / self.script).resolve().relative_to(EXAMPLES).as_posix()

    def is_recorded(self) -> bool:
        """Whether its page shows what this run prints on two processes."""
        return is_recorded(self.path, self.words(Path("runs/x")))


AGREES = "match one process"
SPANNING = "which one process has only one after another"
TWO = "makes two Accelerators that prepare objects"
RECIPES = [
    Recipe(
        "../gpt/train.py",
        ("--steps", 3, "--validation-windows", 150, "--out", OUT),
        partial(gpt.losses, steps=3, validation_windows=150),
        pattern="validation loss NUMBER nats =",
        tolerance=1e-3,
        bf16=(1e-3, 1e-3),  # it prints so many digits
        quick=(2,),
        check=AGREES,
    ),
    Recipe(
        "lora.py",
        ("--epochs", 2, "--windows", 325, "--out", OUT),
        partial(lora.losses, epochs=2, windows=325),
        quick=(2,),  # and on 1 below
        bf16=(7e-4, 8e-3),
        check=AGREES,
    ),
    Recipe(
        "masked_lm.py",
        ("--epochs", 2, "--windows", 325),
        partial(masked_lm.losses, epochs=2, windows=325),
        bf16=(2e-4, 5e-4),
        check=AGREES,
    ),
    Recipe(
        "seq2seq.py",
        ("--epochs", 2, "--questions", 665),
        partial(seq2seq.results, epochs=2, questions=665),
        pattern="(?:loss|accuracy|answers of) NUMBER",
        dtype="float64",
        check=AGREES,
        bf16=(6e-5, 4e-3),
    ),
    Recipe(
        "seq2seq.py",
        ("--epochs", 2, "--questions", 665, "--parallel", "zero=3"),
        partial(seq2seq.results, epochs=2, questions=665),
        pattern="(?:loss|accuracy|answers of) NUMBER",
        dtype="float64",
        check=AGREES,
        bf16=(6e-5, 4e-3),
        quick=(),
    ),
    Recipe(
        "image_classifier.py",
        ("--model", "resnet", "--epochs", 1),
        partial(image_classifier.results, model="resnet", epochs=1),
        check=SPANNING,
        dtype="float64",
        bf16=(6e-5, 0.07),  # batch normalisation makes rounding grow, also that of float32
    ),
    Recipe(
        "image_classifier.py",
        ("--model", "vit", "--epochs", 1),
        partial(image_classifier.results, model="vit", epochs=1),
        quick=(2,),
        check=AGREES,
    ),
    Recipe(
        "contrastive.py",
        ("--epochs", 3),
        partial(contrastive.results, epochs=3),
        tolerance=2e-4,
        check=SPANNING,
        bf16=(2e-3, 8e-3),
    ),
    Recipe("gan.py", ("--epochs", 2), partial(gan.losses, epochs=2), check=AGREES, bf16=(5e-4, 5e-4)),
    Recipe(
        "gan.py",
        ("--epochs", 2, "--accumulation", 2, "--batch-size", 32),
        partial(gan.losses, epochs=2),
        check=AGREES,
        bf16=(5e-4, 5e-4),
    ),
    *(
        Recipe(
            "gan.py",
            ("--epochs", 2, "--accumulation", 2, "--batch-size", 32, "--parallel", parallel),
            partial(gan.losses, epochs=2),
            quick=(),
            check=AGREES,
            bf16=(5e-4, 5e-4),
        )
        for parallel in ("zero=2", "zero=3")
    ),
    Recipe(
        "distillation.py",
        ("--epochs", 2),
        partial(distillation.losses_and_accuracies, epochs=2),
        "(?:loss|right on) NUMBER",
        check=TWO,
        bf16=(6e-5, 5e-3),
    ),
    Recipe(
        "distillation.py",
        ("--epochs", 2, "--teacher", "zero=2", "--student", "zero=3"),
        partial(distillation.losses_and_accuracies, epochs=2),
        "(?:loss|right on) NUMBER",
        check=TWO,
        bf16=(6e-5, 5e-3),
        quick=(),
    ),
    Recipe(
        "ema.py",
        ("--epochs", 2),
        partial(ema.losses, epochs=2),
        "(?:loss|weights) NUMBER",
        check=AGREES,
        bf16=(6e-5, 4e-3),
    ),
    Recipe(
        "ema.py",
        ("--epochs", 2, "--parallel", "ddp", "--accumulation", 2, "--batch-size", 32),
        partial(ema.losses, epochs=2),
        "(?:loss|weights) NUMBER",
        quick=(),
        check=AGREES,
        bf16=(4e-3, 4e-3),
    ),
    Recipe(
        "long_context.py",
        ("--steps", 3, "--length", 256),
        partial(long_context.losses, steps=3, length=256),
        check=AGREES,
        parallel="cp=2",
    ),
    Recipe(
        "mixture_of_experts.py",
        ("--epochs", 2),
        partial(mixture_of_experts.losses, epochs=2),
        check=SPANNING,
        parallel="ep=2",
        bf16=(6e-5, 0.025),  # a rounded router sends tokens elsewhere
    ),
    Recipe(
        "slow_links.py",
        ("--mode", "sync", "--steps", 6, "--every", 6),  # `lockstep check` ends before the validation
        partial(slow_links.synchronous_losses, steps=6, every=6),
        check=AGREES,
    ),
]
NOTHING_IS_TRAINED = {"batch_inference.py", "larger_than_memory.py"}  # test_recipes_more.py


def of_oracle(recipe: Recipe) -> list[float]:
    assert recipe.oracle is not None
    path, is_bf16 = (FOLDER / recipe.script).resolve(), recipe.dtype == "bf16"
    torch.set_default_dtype(torch.float32 if is_bf16 else getattr(torch, recipe.dtype))
    with beside(path):
        module = importlib.import_module(path.stem)
        with bf16.autocast_modules(module) if is_bf16 else nullcontext():
            return recipe.oracle(module)


Expected = Callable[[Recipe], list[float]]


@pytest.fixture(scope="module")
def expected(worker_pool: WorkerPool, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """The numbers that a recipe must print, computed once."""
    known: dict[object, list[float]] = {}

    def find(recipe: Recipe) -> list[float]:
        # Rows that differ in how the model is spread have one oracle.
        key = str(recipe) if recipe.oracle is None else (repr(recipe.oracle), recipe.dtype)
        if key not in known:
            if recipe.oracle is not None:
                (known[key],) = worker_pool.run(of_oracle, 1, recipe, timeout_s=150)
            else:
                words = recipe.words(tmp_path_factory.mktemp("one"))
                text = run(1, f"recipes/{recipe.script}", *words, dtype=recipe.dtype)
                known[key] = numbers(recipe.pattern, text)
        return known[key]

    return find


def cases() -> list[Any]:
    """Every recipe on 1, 2 and 4 processes; where there is no oracle, that on 1 is what others are compared with."""
    found = []
    for recipe in RECIPES:
        for processes in (1, 2, 4)[recipe.oracle is None :]:
            is_again = processes not in recipe.quick
            found.append((again if is_again else pytest.param)(recipe, processes))
    return found


@pytest.mark.parametrize(("recipe", "processes"), cases(), ids=str)
def test_a_recipe_prints_the_numbers_of_one_process(
    run: Run, expected: Expected, recipe: Recipe, processes: int, tmp_path: Path
) -> None:
    text = run(processes, f"recipes/{recipe.script}", *recipe.words(tmp_path), dtype=recipe.dtype)
    found = numbers(recipe.pattern, text)
    assert found, text
    assert found == pytest.approx(expected(recipe), rel=recipe.tolerance, abs=recipe.tolerance)
    if processes == 2 and recipe.is_recorded():
        assert_as_recorded(recipe.path, recipe.words(tmp_path), text)


def test_what_the_page_of_a_recipe_shows_is_compared() -> None:
    compared = {recipe.path for recipe in RECIPES if recipe.is_recorded() and 2 in recipe.quick}
    elsewhere = {f"recipes/{script}" for script in NOTHING_IS_TRAINED | {"slow_links.py"}}
    assert compared | elsewhere == {recipe.path for recipe in RECIPES} | elsewhere


@pytest.mark.parametrize(
    ("script", "words", "like"),
    [
        ("image_classifier.py", ("--epochs", 1, "--model", "resnet", "--parallel", "ddp"), "--model resnet"),
        ("contrastive.py", ("--epochs", 3, "--local"), "contrastive.py"),
    ],
)
def test_two_processes_that_look_at_their_own_rows_only_print_other_numbers(
    run: Run, expected: Expected, script: str, words: tuple[object, ...], like: str
) -> None:
    (recipe,) = (recipe for recipe in RECIPES if like in str(recipe))
    found = numbers(recipe.pattern, run(2, f"recipes/{script}", *words, dtype=recipe.dtype))
    assert len(found) == len(expected(recipe))
    assert abs(found[0] - expected(recipe)[0]) > 10 * recipe.tolerance


def test_lora_goes_on_where_it_was_interrupted_and_saves_its_adapter_alone(
    run: Run, expected: Expected, tmp_path: Path
) -> None:
    (recipe,) = (recipe for recipe in RECIPES if recipe.script == "lora.py")
    words = ("recipes/lora.py", "--windows", 325, "--out", tmp_path)
    first = run(2, *words, "--epochs", 1)
    rest = run(1, *words, "--epochs", 2, "--resume")
    found = numbers(recipe.pattern, first)[:1] + numbers(recipe.pattern, rest)
    assert found == pytest.approx(expected(recipe), abs=recipe.tolerance)
    (adapter,) = (tmp_path / "adapter").glob("*.safetensors")
    with safe_open(adapter, "pt") as file:
        assert {name.split(".")[-2] for name in file.keys()} == {"lora_A", "lora_B"}  # noqa: SIM118 - no dict


# In bf16 a number has 8 bits. Ranks round the gradients of their own rows, by up to 2^-9 of them, so the losses depend
# on how rows are divided. The bounds of the rows are twice what was measured on 1, 2 and 4 processes.
@pytest.mark.parametrize(
    ("recipe", "processes"),
    [
        (pytest.param if processes == 2 and str(recipe) == "ema.py --epochs 2" else again)(recipe, processes)
        for recipe in RECIPES
        for processes in (1, 2)
    ],
    ids=str,
)
def test_a_recipe_in_bf16_has_the_losses_of_plain_autocast(
    run: Run, expected: Expected, recipe: Recipe, processes: int, tmp_path: Path
) -> None:
    words = [*recipe.words(tmp_path), *(["--bf16"] if "gpt" in recipe.script else [])]
    in_bf16 = {"LOCKSTEP_MIXED_PRECISION": "bf16"}
    text = run(processes, f"recipes/{recipe.script}", *words, environment=in_bf16)
    found, plain = numbers(recipe.pattern, text), expected(replace(recipe, dtype="bf16"))
    bound = recipe.bf16[processes > 1]
    # Shares of right answers: of 66 and more answers, a few are others.
    are_losses = ["loss" in line or "weights" in line for line in matches(recipe.pattern, text)]
    for value, of_oracle, is_loss in zip(found, plain, are_losses, strict=True):
        assert value == pytest.approx(
            of_oracle, abs=bound if is_loss else 0.05, rel=bound if is_loss else 0.05
        )
    exact = expected(replace(recipe, dtype="float32"))
    assert max(abs(a - b) for a, b in zip(found, exact, strict=True)) > 5e-6  # it was not float32


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe.check], ids=str)
def test_lockstep_check_says_that_a_recipe_agrees_or_why_it_cannot_tell(
    recipe: Recipe, tmp_path: Path
) -> None:
    flags = ["--parallel", recipe.parallel] if recipe.parallel else []
    command = [*CHECK, *flags, str((FOLDER / recipe.script).resolve()), *recipe.words(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert recipe.check is not None and recipe.check in done.stdout + done.stderr
    assert done.returncode == (0 if "agree" in done.stdout else 2)


def help_of(script: str) -> str:
    """What ``--help`` prints."""
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
    assert {recipe.script for recipe in RECIPES} == {*SCRIPTS, "../gpt/train.py"} - NOTHING_IS_TRAINED
    assert {*SCRIPTS, "../gpt/train.py"} <= set(rows())


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_recipe_fits_one_sitting(script: str) -> None:
    assert len((FOLDER / script).read_text(encoding="utf-8").splitlines()) < 150
