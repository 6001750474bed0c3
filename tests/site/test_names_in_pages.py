"""What pages name exists: modules and attributes of the package, methods of Accelerator, words of parallel, options."""

from __future__ import annotations

import ast
import importlib
import re

import click
import pytest

from lockstep import Accelerator
from lockstep.utils import Parallel
from tests.site.commands import walk
from tests.site.pages import ROOT
from tests.site.test_plain_english import TEXTS

PAGES = sorted(name for name in TEXTS if name != "architecture.md" and not name.startswith("examples/"))
OF_OTHERS = {
    "--help",
    *("--mode", "--slow-ms", "--resume"),  # of example scripts
    *("--include", "--exclude"),  # of DeepSpeed
    *("--cpus-per-task", "--job-name", "--open-mode", "--requeue", "--signal"),  # of Slurm
    *("--gpus-per-task", "--gpu-bind"),  # of Slurm
    *("--local-rank", "--use-env"),  # of torch.distributed.launch
    *("--log-line-prefix-template", "--print-completion"),  # of torchrun
    *("--cp-size", "--tp-size", "--dp-replicate-size", "--dp-shard-size"),  # of Accelerate's examples
}


def resolves(dotted: str) -> bool:
    """Whether ``lockstep.a.b`` is a module or an attribute of one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


@pytest.mark.parametrize("page", PAGES)
def test_dotted_names_lead_somewhere(page: str) -> None:
    found = set(re.findall(r"`(lockstep(?:\.[A-Za-z_]\w*)+)", TEXTS[page]))
    assert [name for name in sorted(found) if not resolves(name)] == []


@pytest.mark.parametrize("page", PAGES)
def test_methods_of_accelerator_exist(page: str) -> None:
    found = set(re.findall(r"\baccelerator\.([a-z_]\w*)", TEXTS[page]))
    assert [name for name in sorted(found) if not hasattr(Accelerator, name)] == []


@pytest.mark.parametrize("page", PAGES)
def test_words_of_parallel_are_known(page: str) -> None:
    for text in re.findall(r'parallel="([^"…]+)"', TEXTS[page]):
        if "..." not in text and "N" not in text:
            Parallel.parse(text)


def options() -> set[str]:
    """Every long option of every command."""
    return {
        word
        for _, command in walk()
        for option in command.params
        if isinstance(option, click.Option)
        for word in (*option.opts, *option.secondary_opts)
    }


def options_of_rlhf() -> set[str]:
    """Those of the recipe, which has a page of its own."""
    tree = ast.parse((ROOT / "examples/recipes/rlhf/options.py").read_text(encoding="utf-8"))
    assigned = (node for node in tree.body if isinstance(node, ast.Assign))
    texts = next(node.value for node in assigned if getattr(node.targets[0], "id", None) == "HELP")
    return {"--" + name.replace("_", "-") for name in ast.literal_eval(texts)}


OPTIONS = options() | options_of_rlhf()


@pytest.mark.parametrize("page", PAGES)
def test_options_exist(page: str) -> None:
    found = set(re.findall(r"`(--[a-z][a-z-]*[a-z])(?![a-z0-9_*-])", TEXTS[page]))
    assert [word for word in sorted(found) if word not in OPTIONS | OF_OTHERS] == []
