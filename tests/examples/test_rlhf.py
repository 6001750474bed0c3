"""The RLHF recipe: the same rewards and losses on 1, 2 and 4 processes, right steps, exact resumes, learning."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import chain, product
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from lockstep.testing import WorkerPool
from tests.examples import rlhf_runs as runs
from tests.marks import again

BIN = Path(sys.executable).parent
History = list[dict[str, float]]
WholeRun = Callable[[str, int], History]
FIRST_WORDS = {"ppo": runs.PPO, "grpo": runs.GRPO}
WITHOUT_ROUNDING = ("reward", "answer tokens")  # counts of tokens: the same answers were drawn


def on(worker_pool: WorkerPool, ranks: int, **changes: Any) -> History:
    """The history of a run, which all ranks must have."""
    first, *others = worker_pool.run(runs.run, ranks, timeout_s=300, **changes)
    assert all(other == first for other in others)
    return first


def assert_same(ours: History, theirs: History, within: float = 2e-5) -> None:
    assert len(ours) == len(theirs) > 0
    for now, then in zip(ours, theirs, strict=True):
        assert now.keys() == then.keys()
        for name in now:
            exact = name in WITHOUT_ROUNDING
            assert now[name] == pytest.approx(then[name], rel=0, abs=1e-6 if exact else within), name


# The same numbers ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_run(worker_pool: WorkerPool) -> WholeRun:
    """``whole_run(algorithm, ranks)``: the history of a run that nothing interrupts; made once."""
    return functools.cache(lambda algorithm, ranks: on(worker_pool, ranks, **FIRST_WORDS[algorithm]))


@pytest.mark.parametrize(
    ("algorithm", "ranks"), [("ppo", 2), ("grpo", 2), ("grpo", 4), again("ppo", 4), again("ppo", 3)]
)
def test_many_processes_have_the_rewards_and_losses_of_one(
    whole_run: WholeRun, algorithm: str, ranks: int
) -> None:
    assert_same(whole_run(algorithm, ranks), whole_run(algorithm, 1))


STRATEGIES = [
    {
        "policy_parallel": "ddp",
        "value_parallel": "ddp",
        "reference_parallel": "ddp",
        "reward_parallel": "ddp",
    },
    {"policy_parallel": "zero=2", "value_parallel": "zero=3", "reference_parallel": "stream=cpu"},
    {"policy_parallel": "zero=1", "value_parallel": "ddp", "reference_parallel": "stream=FOLDER"},
    {
        "policy_parallel": "zero=3 activation=full",
        "reference_parallel": "zero=3 offload=params offload_to=FOLDER",
    },
    {"policy_parallel": "zero=3 offload", "reward_parallel": "stream=cpu", "micro_batch": 1},
    {"policy_parallel": "zero=2", "value_parallel": "zero=2 offload=optimizer", "generation_batch": 1},
]


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 4))])
@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ("ppo", STRATEGIES[1]),
        *(
            pytest.param(algorithm, words, marks=pytest.mark.exhaustive)
            for algorithm in FIRST_WORDS
            for words in STRATEGIES
            if (algorithm, words) != ("ppo", STRATEGIES[1])
        ),
    ],
)
def test_each_model_may_have_a_strategy_of_its_own(
    worker_pool: WorkerPool, tmp_path: Path, whole_run: WholeRun, ranks: int, algorithm: str, words: dict
) -> None:
    if ranks == 1 and any("offload=params" in str(word) for word in words.values()):
        words = {**words, "reference_parallel": "offload=params offload_to=FOLDER"}
    filled = {
        name: word.replace("FOLDER", str(tmp_path)) if isinstance(word, str) else word
        for name, word in words.items()
    }
    assert_same(on(worker_pool, ranks, **{**FIRST_WORDS[algorithm], **filled}), whole_run(algorithm, 1))


# Ranks round the gradients of their own rows: in bf16, of 8 bits, by up to 2^-9; in fp16, of 11 bits, by an
# eighth. Over a run of one iteration fp16 came to 3e-5.
@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("precision", "within"), [("bf16", 0.02), ("fp16", 1e-4)])
@pytest.mark.parametrize("algorithm", FIRST_WORDS)
def test_half_precision_has_nearly_the_numbers_of_one_process(
    worker_pool: WorkerPool, algorithm: str, precision: str, within: float, ranks: int
) -> None:
    words = {**FIRST_WORDS[algorithm], "iterations": 1}
    many, alone = (worker_pool.run(runs.run_in, n, precision, **words)[0] for n in (ranks, 1))
    assert_same(many, alone, within)


# Generation ---------------------------------------------------------------------------------------------


CASES = [("llama", 1, 5, ()), ("llama", 2, 5, (0, 1, 2)), ("gpt2", 2, 5, (3,)), ("gpt2", 4, 3, ())]


@pytest.mark.parametrize(
    ("model", "ranks", "count", "ends"),
    [
        *CASES,
        *(again(*case) for case in product(("llama", "gpt2"), (2, 3, 4), (1, 5, 9), [(0, 4)])),
    ],
)
def test_answers_are_those_of_a_plain_loop_and_weights_are_gathered_once(
    worker_pool: WorkerPool, model: str, ranks: int, count: int, ends: tuple[int, ...]
) -> None:
    """Ragged prompts; ranks without prompts (4 ranks and 3 prompts, or 1); rows that end at their first token."""
    expected, lengths = runs.answers_by_hand(count, ends, model=model)
    assert all(lengths[row] == 1 for row in ends if row < count)
    for rank, found in enumerate(worker_pool.run(runs.generates, ranks, count, ends, model=model)):
        assert found["answers"].tolist() == expected.tolist()
        assert len(set(found["mask"].sum(1).tolist())) > 1 or count < 5  # ragged
        # Once for all tokens, and that is all that is sent but for the answers.
        assert found["gathered"] == (found["bytes"] if ranks > 1 else 0)
        # The prompt at once, then one token after the other: keys and values are kept.
        each, widths = -(-count // ranks), []
        own = lengths[rank * each : (rank + 1) * each]
        for batch in (own[:2], own[2:4], own[4:6], own[6:8], own[8:]):
            widths += [found["prompt width"], *[1] * (max(batch) - 1)] if batch else []
        assert found["widths"] == widths


def test_four_processes_train_on_three_prompts(worker_pool: WorkerPool) -> None:
    words = {**runs.PPO, "prompts_per_iteration": 3, "minibatches": 1}
    assert_same(on(worker_pool, 4, **words), on(worker_pool, 1, **words))


# Training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("algorithm", FIRST_WORDS)
def test_steps_are_those_of_the_formulas_in_one_plain_process(
    worker_pool: WorkerPool, algorithm: str, ranks: int
) -> None:
    words = {
        **FIRST_WORDS[algorithm],
        "micro_batch": 2,
        "clip": 0.05,
        "learning_rate": 0.01,
        "temperature": 1.3,
    }
    words |= {"kl_weight": 0.3, "gamma": 0.9}
    found = worker_pool.run(runs.trains_once, ranks, **words)
    expected = runs.trained_by_hand(found[0]["rollout"], **words)
    for result in found:
        rollout = result["rollout"]
        for name, key in (("policy", "logprobs"), ("reference", "reference"), ("value", "values")):
            for row, old in enumerate(expected["old"].get(name, [])):
                torch.testing.assert_close(rollout[key][row, : len(old)], old, rtol=1e-4, atol=1e-5)
        for losses, right in zip(result["losses"], expected["losses"], strict=True):
            assert losses == pytest.approx(right, rel=1e-3, abs=1e-5)
        for name in ("policy", *(["value"] if algorithm == "ppo" else [])):
            for key, weight in expected[name].items():
                torch.testing.assert_close(result[name][key], weight, rtol=0, atol=5e-5, msg=f"{name} {key}")


@pytest.mark.exhaustive
def test_the_loss_of_grpo_is_that_of_trl() -> None:
    """The formula, and its gradient for each token, as in ``GRPOTrainer`` with ``loss_type="grpo"``."""
    from trl import GRPOTrainer

    grpo, random = runs.recipe("grpo"), torch.Generator().manual_seed(0)
    old, reference, rewards = (torch.randn(8, *shape, generator=random) for shape in ((5,), (5,), ()))
    mask = torch.arange(5) < torch.randint(1, 6, (8, 1), generator=random)
    found = []
    for ours in (True, False):
        now = (old + 0.3 * torch.randn(8, 5, generator=torch.Generator().manual_seed(1))).requires_grad_()
        advantages = grpo.group_advantages(rewards, 4)
        if ours:
            losses = grpo.policy_loss(now, old, reference, advantages, clip=0.2, kl_weight=0.1)
            loss = (losses * grpo.token_weights(mask)).sum() / 8
        else:
            trainer = MagicMock(epsilon_low=0.2, epsilon_high=0.2, beta=0.1, loss_type="grpo")
            trainer.top_entropy_quantile, trainer.off_policy_mask_threshold = 1.0, None
            trainer.importance_sampling_level, trainer.use_vllm, trainer.aux_loss_enabled = (
                "token",
                False,
                False,
            )
            trainer.args.use_bias_correction_kl, trainer.args.delta = False, None
            trainer.current_gradient_accumulation_steps, trainer.entropy_coef = 1, 0.0
            trainer.use_adaptive_entropy = False
            trainer._get_per_token_logps_and_entropies.return_value = now, torch.zeros(8, 5), None
            trainer.accelerator.gather.side_effect = lambda tensor: tensor
            ids = torch.zeros(8, 5, dtype=torch.long)
            given = {
                "prompt_ids": ids,
                "prompt_mask": ids,
                "completion_ids": ids,
                "completion_mask": mask.long(),
            }
            given |= {"old_per_token_logps": old, "ref_per_token_logps": reference, "advantages": advantages}
            loss = GRPOTrainer._compute_loss(trainer, MagicMock(), given)
        loss.backward()
        found.append((loss.detach(), now.grad))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


# Going on -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "boundary", "ranks", "then"),
    [
        ("ppo", 4, 2, 2),  # after the second rollout
        ("ppo", 5, 2, 1),  # after the first epoch of training on it
        ("grpo", 4, 2, 4),
        *(
            pytest.param(algorithm, boundary, ranks, then, marks=pytest.mark.exhaustive)
            for algorithm in FIRST_WORDS
            for boundary in (1, 2, 3, 4, 5)
            for ranks, then in ((1, 1), (1, 2), (2, 2), (4, 4), (4, 2))
        ),
    ],
)
def test_a_run_goes_on_in_the_middle_of_an_iteration(
    worker_pool: WorkerPool,
    tmp_path: Path,
    whole_run: WholeRun,
    algorithm: str,
    boundary: int,
    ranks: int,
    then: int,
) -> None:
    words, folder, whole = FIRST_WORDS[algorithm], str(tmp_path), whole_run(algorithm, ranks)
    on(worker_pool, ranks, out=folder, save_every=boundary, stop_at=boundary, **words)
    again = on(worker_pool, then, out=folder, resume=True, **words)
    if then == ranks:
        assert again == whole  # bit by bit
    else:
        assert_same(again, whole)


# Learning -----------------------------------------------------------------------------------------------

LEARNT = 0.85  # of at most 1; answers drawn at random have 0


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"algorithm": "grpo", "group": 8, "prompts_per_iteration": 8},
        pytest.param({"model": "gpt2"}, marks=pytest.mark.exhaustive),
    ],
    ids=["ppo", "grpo", "gpt2"],
)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_the_task_is_learnt(worker_pool: WorkerPool, words: dict, ranks: int) -> None:
    rewards = [now["reward"] for now in on(worker_pool, ranks, **words)]
    assert abs(rewards[0]) < 0.2
    assert sum(rewards[-3:]) / 3 > LEARNT


# A command line -----------------------------------------------------------------------------------------


def test_real_models_and_prompts_come_from_files(worker_pool: WorkerPool, tmp_path: Path) -> None:
    words = {**runs.PPO, **runs.save_models(tmp_path)}
    assert_same(on(worker_pool, 2, **words), on(worker_pool, 1, **words))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--algorithm dpo", "--algorithm is dpo, but must be ppo or grpo."),
        ("--algorithm grpo", "compares the answers to one prompt, but --group is 1. Use 2 or more."),
        ("--minibatches 5", "32 rows are not divided by --minibatches 5."),
        ("--micro-batch 0", "--micro-batch is 0, but must be above 0."),
        ("--model some/model", "--model some/model needs --reward-model and --prompts"),
        ("--resume", "--save-every and --resume need a folder. Add --out FOLDER."),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(words: str, said: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        runs.recipe("options").parse(words.split())
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_commands_of_the_help_and_the_pages_parse_and_each_option_is_explained(capsys) -> None:
    options = runs.recipe("options")
    with pytest.raises(SystemExit):
        options.parse(["--help"])
    pages = (runs.RECIPE / "README.md", runs.EXAMPLES.parent / "docs" / "how-to" / "rlhf.md")
    texts = [capsys.readouterr().out, *(page.read_text(encoding="utf-8") for page in pages)]
    found = [
        re.findall(r"^ *(?:python|lockstep).*examples/recipes/rlhf/train\.py *(.*)", text, flags=re.MULTILINE)
        for text in (text.replace("\\\n", " ") for text in texts)
    ]
    assert [len(commands) for commands in found] == [4, 4, 5]
    for words in chain.from_iterable(found):
        options.parse(words.split())
    assert options.HELP.keys() == {field.name for field in dataclasses.fields(options.Options)}


# What goes wrong ----------------------------------------------------------------------------------------


def launch(tmp_path: Path, kind: str, *more: str) -> tuple[int, str]:
    """Exit code and output of a run on 2 processes in which something happens to rank 1."""
    script = tmp_path / "disturbed.py"
    names = {"marker": str(tmp_path / "marker"), "result": str(tmp_path / "history.json")}
    script.write_text(runs.DISTURBED.format(recipe=str(runs.RECIPE), kind=kind, **names), encoding="utf-8")
    words = [f"--{name.replace('_', '-')}={value}" for name, value in runs.PPO.items()]
    command = [str(BIN / "lockstep"), "launch", "--nproc", "2", *more, str(script), *words]
    command += ["--out", str(tmp_path / "out"), "--save-every", "1", "--resume"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


def assert_ended_as(whole: History, tmp_path: Path) -> None:
    found = json.loads((tmp_path / "history.json").read_text())
    assert [{name: value for name, value in now.items() if "/s" not in name} for now in found] == whole


@pytest.mark.exhaustive
def test_a_process_that_is_killed_while_others_generate_is_started_again(
    tmp_path: Path, whole_run: WholeRun
) -> None:
    code, said = launch(tmp_path, "kill", "--max-restarts", "1")
    assert code == 0, said
    assert_ended_as(whole_run("ppo", 2), tmp_path)


@pytest.mark.exhaustive
def test_a_run_that_is_asked_to_stop_saves_between_epochs_and_goes_on(
    tmp_path: Path, whole_run: WholeRun
) -> None:
    code, said = launch(tmp_path, "terminate")
    assert code == 75, said
    code, said = launch(tmp_path, "terminate")
    assert code == 0, said
    assert_ended_as(whole_run("ppo", 2), tmp_path)
