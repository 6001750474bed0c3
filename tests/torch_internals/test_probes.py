"""Each probe passes on the installed torch, and refuses one of unknown shape in one sentence."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.errors import UsageError
from lockstep.torch_internals import NEWEST, OLDEST, unknown

SENTENCE = (
    r"this torch's .* in a way that this version does not know; use torch 2\.11 to 2\.15 or a newer lockstep"
)
ENGINES = (
    *(
        "fsdp2_probe",
        "pipelining",
        "dtensor",
        "c10d",
        "modules",
        "tensors",
        "autograd",
        "optim",
    ),
    *("dataloader", "dispatch", "fake", "gloo", "kernels", "compile"),
    "c10d:probe_recorder",
)


def engine(name: str) -> Callable[[], None]:
    """The probe of an engine, ``file`` or ``file:function``, as if it had never run."""
    file, _, function = name.partition(":")
    probe: Any = getattr(importlib.import_module(f"lockstep.torch_internals.{file}"), function or "probe")
    probe.cache_clear()
    return probe


def of(path: str) -> Any:
    """The object at a dotted path, ``module:attribute.attribute``."""
    module, _, attributes = path.partition(":")
    found = importlib.import_module(module)
    for name in filter(None, attributes.split(".")):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("name", ENGINES)
def test_the_installed_torch_passes(name: str) -> None:
    engine(name)()


def test_probes_leave_random_numbers_and_settings_as_they_were() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            for name in ENGINES:
                engine(name)()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.rand(2), expected)


class Watching(TorchDispatchMode):
    """Asks every result for its memory, as a profiler of the user may; sparse tensors have none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(value, torch.Tensor):
                value.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    "mode", [Watching, FakeTensorMode, lambda: torch.device("meta")], ids=["watching", "fake", "meta"]
)
def test_probes_see_no_mode_of_the_user(name: str, mode: Callable[[], Any]) -> None:
    """Otherwise the first ``prepare`` of a process would say that this torch is unknown."""
    probe = engine(name)
    with mode():
        probe()


GONE = [
    ("fsdp2_probe", "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup", "post_backward"),
    ("pipelining", "torch.distributed.pipelining.schedules", "_add_send_recv"),
    ("dtensor", "torch.distributed.device_mesh:DeviceMesh", "_flatten"),
    ("c10d", "torch.distributed", "_broadcast_coalesced"),
    ("optim", "torch.amp:GradScaler", "_get_scale_async"),
    ("dataloader", "torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter"),
    ("tensors", "torch", "_neg_view"),
    ("autograd", "torch._C", "_current_graph_task_id"),
    ("modules", "torch.nn:MultiheadAttention", "_reset_parameters"),
]


@pytest.mark.parametrize(("name", "owner", "attribute"), GONE, ids=[case[0] for case in GONE])
def test_a_torch_without_a_name_is_refused(monkeypatch, name: str, owner: str, attribute: str) -> None:
    probe = engine(name)
    monkeypatch.delattr(of(owner), attribute)
    with pytest.raises(UsageError, match=SENTENCE):
        probe()


OTHERWISE = [
    ("autograd", "torch._C", "_current_graph_task_id", lambda: 0),
    ("c10d", "lockstep.torch_internals.c10d", "reduction_of", lambda op: (None, None)),
    ("c10d:probe_recorder", "lockstep.torch_internals.c10d", "DUMPS", ()),
    ("modules", "torch.nn:Module", "half", lambda self: self),
    ("tensors", "torch", "_neg_view", lambda tensor: tensor.view(tensor.shape)),
    ("fake", "lockstep.torch_internals.fake", "UNKNOWN_VALUE", ()),
    ("gloo", "lockstep.torch_internals.gloo", "NAMESPACE", "aten"),
    ("compile", "lockstep.torch_internals.compile", "original", lambda module: None),
    ("dispatch", "lockstep.torch_internals.dispatch", "argument_names", lambda operator: []),
    (
        "kernels",
        "lockstep.torch_internals.kernels",
        "flash_for_cpu",
        lambda q, k, v, *_, **__: (q, q[..., 0]),
    ),
    ("optim", "torch.amp:GradScaler", "_get_scale_async", lambda self: None),
]


@pytest.mark.parametrize(("name", "owner", "attribute", "instead"), OTHERWISE, ids=[c[0] for c in OTHERWISE])
def test_a_torch_with_another_meaning_is_refused(
    monkeypatch, name: str, owner: str, attribute: str, instead: Any
) -> None:
    probe = engine(name)
    monkeypatch.setattr(of(owner), attribute, instead, raising=False)
    with pytest.raises(UsageError):
        probe()


def test_a_second_name_of_a_gradient_is_not_taken_for_a_second_gradient(monkeypatch) -> None:
    """As if torch from 2.15 on were read like torch before, and the other way round."""
    probe = engine("fsdp2_probe")
    fsdp2 = importlib.import_module("lockstep.torch_internals.fsdp2")
    was = fsdp2.accumulates_in_leaf()
    monkeypatch.setattr(fsdp2, "accumulates_in_leaf", lambda: not was)
    with pytest.raises(UsageError, match="fully_shard keeps gradients " + SENTENCE.partition(".* ")[2]):
        probe()


def test_a_gradient_that_is_kept_elsewhere_is_refused(monkeypatch) -> None:
    group = of("torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup")
    probe = engine("fsdp2_probe")

    def post_backward(self: Any) -> None:
        for param in self.fsdp_params:
            param.elsewhere, param._unsharded_param.grad = param._unsharded_param.grad, None

    monkeypatch.setattr(group, "post_backward", post_backward)
    with pytest.raises(UsageError):
        probe()


def test_an_unknown_torch_is_refused_before_a_model_is_changed(monkeypatch) -> None:
    from lockstep import Accelerator

    probe = engine("tensors")
    monkeypatch.setattr(torch, "_neg_view", lambda tensor: tensor.view(tensor.shape))
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=SENTENCE):
        Accelerator(cpu=True).prepare(model)
    assert type(model) is nn.Linear
    monkeypatch.undo()
    probe()


def test_the_sentence_has_the_versions() -> None:
    assert OLDEST == "2.11"
    assert NEWEST in str(unknown("fully_shard", "keeps gradients"))
