"""``compile=blocks``: which modules are compiled, how often, and that the model stays the user's object."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from lockstep import Accelerator
from lockstep.errors import ConfigError, UsageError
from lockstep.utils import Parallel, TorchDynamoPlugin
from parallel import split_problem as problem
from tests.refusals import expect_refusal


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


@pytest.mark.parametrize("parallel", ["compile=blocks", "compile=blocks activation=full"])
def test_blocks_of_torch_itself_are_compiled(parallel: str) -> None:
    counter = CompileCounter()
    torch.manual_seed(0)
    plain, x = encoder(), torch.randn(2, 5, 16, requires_grad=True)  # as between blocks
    expected = plain(x)
    model = Accelerator(cpu=True, parallel=parallel, dynamo_backend=counter).prepare(plain)  # type: ignore[arg-type]
    found = model(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert counter.frame_count == 1
    assert counter.op_count > 1  # recomputation counts as one
    found.sum().backward()
    file = io.BytesIO()
    torch.save(copy.deepcopy(model), file)
    assert (
        type(torch.load(io.BytesIO(file.getvalue()), weights_only=False).layers[0])
        is nn.TransformerEncoderLayer
    )


@pytest.mark.parametrize("layers", [2, 6])
def test_all_blocks_share_the_code_of_one(layers: int) -> None:
    counter = CompileCounter()
    accelerator = Accelerator(cpu=True, parallel="compile=blocks", dynamo_backend=counter)  # type: ignore[arg-type]
    plain = problem.make_gpt(layers)
    (tokens,) = problem.make_batches(1)
    expected = plain(tokens)
    model = accelerator.prepare(plain)
    assert torch.equal(model(tokens), expected)
    assert counter.frame_count == 1  # and so neither the embedding nor the head were compiled
    assert accelerator.unwrap_model(model) is plain
    assert list(accelerator.get_state_dict(model)) == list(problem.make_gpt(layers).state_dict())


def test_named_blocks_are_compiled() -> None:
    counter = CompileCounter()
    parallel = Parallel.parse("compile blocks=Linear")
    model = Accelerator(cpu=True, parallel=parallel, dynamo_backend=counter).prepare(  # type: ignore[arg-type]
        nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    )
    model(torch.ones(1, 4))
    assert counter.op_count == 2  # the two layers


def test_the_backend_is_inductor_unless_another_is_named() -> None:
    def backend(**given: object) -> object:
        options = Accelerator(cpu=True, **given)._options  # type: ignore[arg-type]
        return None if options.compile_options is None else options.compile_options["backend"]

    assert backend() is None
    assert backend(parallel="zero=2") is None
    assert backend(parallel="zero=2 compile=blocks") == "inductor"
    assert backend(parallel="compile=blocks", dynamo_backend="no") == "inductor"
    assert backend(parallel="compile=blocks", dynamo_backend="eager") == "eager"
    assert backend(compile="blocks", dynamo_plugin=TorchDynamoPlugin(mode="max-autotune")) == "inductor"


def test_a_model_without_blocks_is_refused() -> None:
    accelerator = Accelerator(cpu=True, parallel="compile=blocks", dynamo_backend="eager")
    expect_refusal(UsageError, "blocks=", accelerator.prepare, nn.Linear(2, 2))


@pytest.mark.parametrize("word", ["compile=block", "compile=model", "compile=yes"])
def test_another_word_is_refused(word: str) -> None:
    with pytest.raises(ConfigError):
        Parallel.parse(word)
