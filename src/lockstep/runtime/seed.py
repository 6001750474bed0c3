"""The random number generators of a process: seed them, save them, make ranks agree on them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lockstep.config.enums import RNGType
from lockstep.config.values import suggestion
from lockstep.errors import ConfigError, UsageError
from lockstep.runtime import process


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the random number generators of Python, NumPy and torch, on all devices.

    Args:
        seed: The seed.
        device_specific: Add the rank to the seed, so that the ranks draw different numbers.
        deterministic: Let torch use deterministic algorithms only. An operation that has none raises an error.

    Examples:
        ```python
        import torch
        from lockstep import set_seed

        set_seed(1)
        first = torch.rand(3)
        set_seed(1)
        assert torch.equal(torch.rand(3), first)
        ```
    """
    if device_specific:
        seed += _rank()
    random.seed(seed)
    # NumPy takes 32 bits.
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def rng_state() -> dict[str, object]:
    """Return the state of all generators as a flat dict of ints, floats, strings, None and CPU tensors.

    The plain values survive JSON and the tensors safetensors, so that
    ``set_rng_state`` restores the sequence of numbers exactly.

    Raises:
        UsageError: when NumPy's global generator was replaced by one other than MT19937.
    """
    version, words, gauss = random.getstate()
    state: dict[str, object] = {
        "python.version": version,
        "python.words": torch.tensor(words, dtype=torch.int64),
        "python.gauss": gauss,
        "torch": torch.get_rng_state(),
    }
    state.update(_numpy_state())
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            state[f"cuda.{index}"] = torch.cuda.get_rng_state(index)
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore what ``rng_state`` returned; states of devices that this machine lacks are left out.

    Raises:
        UsageError: when ``state`` is incomplete.
    """
    # All reads come first: a broken state must not leave half of the generators changed.
    python = (
        _read(state, "python.version"),
        tuple(_read(state, "python.words").tolist()),
        _read(state, "python.gauss"),
    )
    torch_state = _read(state, "torch")
    numpy_state = {
        "bit_generator": _read(state, "numpy.generator"),
        "state": {"key": _read(state, "numpy.words").numpy(), "pos": _read(state, "numpy.position")},
        "has_gauss": _read(state, "numpy.has_gauss"),
        "gauss": _read(state, "numpy.gauss"),
    }
    random.setstate(python)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"cuda.{index}" in state:
                torch.cuda.set_rng_state(state[f"cuda.{index}"], index)


_DRIVEN = (RNGType.TORCH, RNGType.CUDA, RNGType.GENERATOR)


def check_rng_types(rng_types: Iterable[str | RNGType]) -> list[RNGType]:
    """Return the generators of these names. Raises ConfigError for an unknown one, or a device this process lacks."""
    names = list(rng_types)
    for name in names:
        if name not in _DRIVEN:
            raise ConfigError(
                f"rng_types has {str(name)!r}, but may name only {', '.join(_DRIVEN)}."
                f"{suggestion(str(name), _DRIVEN) or ' Remove it.'}"
            )
    kinds = [RNGType(name) for name in names]
    if RNGType.CUDA in kinds and not torch.cuda.is_available():
        raise ConfigError("rng_types has 'cuda', but this process sees no CUDA device. Remove it.")
    return kinds


def synchronize_rng_states(
    rng_types: Iterable[str | RNGType], generator: torch.Generator | None = None
) -> None:
    """Give every rank the random number generator states of rank 0.

    Every rank must call it with the same ``rng_types``. Without a process group, it only checks the arguments.

    Args:
        rng_types: Names of generators: ``"torch"``, ``"cuda"`` (this process's device) and ``"generator"``.
        generator: The generator that ``"generator"`` means.

    Raises:
        ConfigError: a name is not an ``RNGType``, or this machine does not have the device.
        UsageError: ``rng_types`` has ``"generator"``, but no ``generator`` was passed.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator
        from lockstep.utils import gather, synchronize_rng_states

        accelerator = Accelerator()
        torch.manual_seed(accelerator.process_index)
        synchronize_rng_states(["torch"])
        drawn = gather(torch.rand(1))
        assert (drawn == drawn[0]).all()  # every rank draws the same
        ```
    """
    kinds = check_rng_types(rng_types)
    if RNGType.GENERATOR in kinds and generator is None:
        raise UsageError("rng_types has 'generator', but no generator was given. Pass generator=...")
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for kind in kinds:
        if kind is RNGType.TORCH:
            torch.set_rng_state(_from_rank_0(torch.get_rng_state()))
        elif kind is RNGType.CUDA:
            torch.cuda.set_rng_state(_from_rank_0(torch.cuda.get_rng_state()))
        elif generator is not None:
            generator.set_state(_from_rank_0(generator.get_state()))


def _rank() -> int:
    runtime = process.current_runtime()
    if runtime is not None:
        return runtime.rank
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _numpy_state() -> dict[str, object]:
    state = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        raise UsageError(
            f"NumPy's global generator is {state['bit_generator']}, whose state cannot be saved; "
            "only MT19937's can. Use numpy.random.Generator objects for other kinds and save those yourself."
        )
    return {
        "numpy.generator": state["bit_generator"],
        "numpy.words": torch.from_numpy(state["state"]["key"].copy()),
        "numpy.position": int(state["state"]["pos"]),
        "numpy.has_gauss": int(state["has_gauss"]),
        "numpy.gauss": float(state["gauss"]),
    }


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave all generators as they were: what runs inside draws numbers from nobody's sequence."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def _read(state: Mapping[str, object], key: str) -> Any:
    if key not in state:
        raise UsageError(
            f"The state of the random number generators has no '{key}'; it has {', '.join(sorted(state))}. Pass "
            "the whole dict that rng_state() returned."
        )
    return state[key]


def _from_rank_0(state: torch.Tensor) -> torch.Tensor:
    """Return ``state`` (uint8, CPU) as rank 0 has it."""
    backends = str(dist.get_backend_config())
    # NCCL alone moves only tensors on the GPU.
    on_wire = state.clone() if any(name in backends for name in process.CPU_BACKENDS) else state.cuda()
    dist.broadcast(on_wire, src=0)
    return on_wire.cpu()
