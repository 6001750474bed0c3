"""How many bytes the parts of a model take, and how much memory there is for them on each device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from lockstep.config.values import bytes_of, repr_short
from lockstep.errors import ConfigError, OffloadError
from lockstep.offload.device_map.placement import TensorPlacement
from lockstep.runtime.host_memory import free_host_bytes

ModelPart = nn.Module | torch.Tensor
NamedModelPart = tuple[str, ModelPart]


def dtype_of(dtype: torch.dtype | str | None, origin: str = "dtype") -> torch.dtype | None:
    """Return a dtype from itself or its name, such as ``"float16"`` or ``"torch.float16"``.

    Raises:
        ConfigError: there is no such dtype.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(
            f"{origin}={repr_short(dtype)} is not a dtype. Use one such as 'bfloat16' or torch.float16."
        )
    return found


def is_converted(dtype: torch.dtype) -> bool:
    """Return whether tensors of this dtype follow the dtype that is asked for: integers and truth values do not."""
    return dtype.is_floating_point or dtype.is_complex


def compute_module_sizes(
    model: nn.Module,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of each module, parameter and buffer: name -> bytes. The name ``""`` is the model.

    Args:
        model: The model. Its tensors may be on the meta device. A tensor with several names counts under the first
            one.
        dtype: The dtype that floating-point tensors get when they are loaded. A tensor of a smaller dtype keeps that.
        special_dtypes: Name of a tensor -> the dtype that it gets, whatever its own is.
        buffers_only: Count buffers and no parameters.

    Raises:
        ConfigError: a dtype is unknown.

    Examples:
        ```python
        import torch
        from lockstep.utils import compute_module_sizes

        model = torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False), torch.nn.Linear(10, 1, bias=False))
        sizes = compute_module_sizes(model)
        assert sizes[""] == 440 and sizes["0"] == 400
        assert compute_module_sizes(model, dtype=torch.bfloat16)[""] == 220
        ```
    """
    wanted = dtype_of(dtype)
    special = {
        name: dtype_of(value, f"special_dtypes[{name!r}]") for name, value in (special_dtypes or {}).items()
    }
    sizes: dict[str, int] = defaultdict(int)
    for name, tensor in _tensors(model, buffers_only):
        own = tensor.dtype.itemsize
        exact = special.get(name)
        if exact is not None:
            own = exact.itemsize
        elif wanted is not None and is_converted(tensor.dtype):
            own = min(own, wanted.itemsize)
        parts = name.split(".")
        # Each tensor counts for all modules around it, and for the model, whose name is empty.
        for count in range(len(parts) + 1):
            sizes[".".join(parts[:count])] += tensor.numel() * own
    return sizes


def _tensors(model: nn.Module, buffers_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
    if not buffers_only:
        yield from model.named_parameters()
    yield from model.named_buffers()


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
) -> int:
    """Return the bytes of all buffers of a model.

    Args:
        model: The model. Its tensors may be on the meta device.
        dtype: As in ``compute_module_sizes``.
        special_dtypes: As in ``compute_module_sizes``.

    Raises:
        ConfigError: a dtype is unknown.

    Examples:
        ```python
        import torch
        from lockstep.utils import compute_module_total_buffer_size

        # Running mean and variance of 8 channels, and a counter of 8 bytes.
        assert compute_module_total_buffer_size(torch.nn.BatchNorm1d(8)) == 2 * 8 * 4 + 8
        ```
    """
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_max_layer_size(
    modules: Iterable[NamedModelPart], module_sizes: Mapping[str, int], no_split_module_classes: Iterable[str]
) -> tuple[int, list[str]]:
    """Return the bytes of the largest layer, and the names of all layers of that size.

    A layer is never divided. It is a module without children, a module of a class that stays whole, or a single
    tensor.

    Args:
        modules: Pairs (name, module or tensor) that are searched, such as ``model.named_children()``.
        module_sizes: Name -> bytes, from ``compute_module_sizes``.
        no_split_module_classes: Names of classes of modules that stay whole.

    Examples:
        ```python
        import torch
        from lockstep.utils import compute_module_sizes, get_max_layer_size

        model = torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False), torch.nn.Linear(10, 1, bias=False))
        sizes = compute_module_sizes(model)
        assert get_max_layer_size(model.named_children(), sizes, []) == (400, ["0"])
        ```
    """
    undivided = set(no_split_module_classes)
    largest = 0
    names: list[str] = []
    # A stack, with the first part on top: layers are met in the model's order.
    waiting = list(modules)[::-1]
    while waiting:
        name, part = waiting.pop()
        children = list(part.named_children()) if isinstance(part, nn.Module) else []
        if children and type(part).__name__ not in undivided:
            waiting += [(f"{name}.{key}" if name else key, child) for key, child in reversed(children)]
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, []
        if size == largest:
            names.append(name)
    return largest, names


def class_names(classes: str | Iterable[str] | None) -> list[str]:
    """Return names of classes from one name, several, or none."""
    if classes is None:
        return []
    return [classes] if isinstance(classes, str) else list(classes)


DeviceName = int | str
MaxMemory = Mapping[DeviceName, int | str]


def accelerator_count() -> int:
    """Return how many accelerators this process sees, not counting MPS."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return 0 if accelerator is None or accelerator.type == "mps" else torch.accelerator.device_count()


def get_max_memory(max_memory: MaxMemory | None = None) -> dict[DeviceName, int]:
    """Return the memory that weights may take on each device, in bytes.

    Args:
        max_memory: Device -> bytes, or a text such as ``"10GiB"`` or ``"500MB"``. A device is the index of an
            accelerator, ``"mps"``, ``"cpu"`` or ``"disk"``. None: the memory that is free now on each accelerator,
            and available on the CPU.

    Returns:
        Device -> bytes: accelerators first, then ``"mps"``, ``"cpu"``, ``"disk"``.

    Raises:
        ConfigError: a device is unknown, or a size cannot be read.

    Examples:
        ```python
        from lockstep.utils import get_max_memory

        assert get_max_memory({"cpu": "1GB"})["cpu"] == 1_000_000_000
        assert get_max_memory()["cpu"] > 0  # what is available now
        ```
    """
    if max_memory is None:
        return _free_memory()
    for device in max_memory:
        if isinstance(device, bool) or not (isinstance(device, int) or device in ("mps", "cpu", "disk")):
            raise ConfigError(
                f"max_memory names the device {repr_short(device)}, which is not known. Use the index of an "
                "accelerator (an integer), 'mps', 'cpu' or 'disk'."
            )
    indices = sorted(device for device in max_memory if isinstance(device, int))
    order = [*indices, *(device for device in ("mps", "cpu", "disk") if device in max_memory)]
    return {device: bytes_of(max_memory[device], f"max_memory[{device!r}]") for device in order}


def _free_memory() -> dict[DeviceName, int]:
    available = free_host_bytes()
    free: dict[DeviceName, int] = {}
    shares_host_memory = False
    for index in range(accelerator_count()):
        if torch.cuda.is_available():
            free[index] = torch.cuda.mem_get_info(index)[0]
            shares_host_memory |= bool(
                getattr(torch.cuda.get_device_properties(index), "is_integrated", False)
            )
        elif torch.xpu.is_available():
            free[index] = torch.xpu.mem_get_info(index)[0]
    if torch.backends.mps.is_available():
        free["mps"] = available
    elif not shares_host_memory:
        # One memory is not counted twice.
        free["cpu"] = available
    return free


def get_balanced_memory(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    low_zero: bool = False,
) -> dict[DeviceName, int]:
    """Lower the limits of memory so that ``infer_auto_device_map`` uses all accelerators about equally.

    The last accelerator keeps all its memory, for the parts for which the others have no room. With one accelerator
    and no ``max_memory``, a tenth of its free memory is left to activations.

    Args:
        model: The model. Its tensors may be on the meta device.
        max_memory: Device -> bytes, as in ``get_max_memory``.
        no_split_module_classes: Names of classes of modules that stay whole.
        dtype: The dtype that floating-point tensors get when they are loaded.
        special_dtypes: Name of a tensor -> the dtype that it gets.
        low_zero: Leave as little as possible on accelerator 0, which then has room for generating text, for instance.

    Returns:
        Device -> bytes, as from ``get_max_memory``.

    Raises:
        ConfigError: a device, a size or a dtype is unknown.

    Examples:
        ```python
        import torch
        from lockstep.utils import get_balanced_memory

        model = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(4)))
        limits = get_balanced_memory(model, max_memory={"cpu": "1MB"})  # no accelerators: nothing to balance
        assert limits["cpu"] == 1_000_000
        ```
    """
    limits = get_max_memory(max_memory)
    if "mps" in limits and torch.backends.mps.is_available():
        return limits
    used = [device for device, size in limits.items() if isinstance(device, int) and size > 0]
    if not used:
        return limits
    if len(used) == 1:
        low_zero = False
        if max_memory is None:
            limits[used[0]] = limits[used[0]] * 9 // 10
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    # With low_zero accelerator 0 gets no share.
    share = sizes[""] // (len(used) - 1 if low_zero else len(used))
    share += _slack(model, sizes, class_names(no_split_module_classes))
    for device in used[:-1]:
        if not (low_zero and device == used[0]):
            limits[device] = min(share, limits[device])
    # The first one gets what the others have no room for.
    if low_zero:
        elsewhere = sum(limits[device] for device in used[1:])
        limits[used[0]] = min(max(0, sizes[""] - elsewhere), limits[used[0]])
    return limits


def _slack(model: nn.Module, sizes: Mapping[str, int], undivided: list[str]) -> int:
    """Return how much more than its equal share a device gets, as layers are not divided: 1.25 layers."""
    modules = dict(model.named_modules(remove_duplicate=False))
    first_of_class: dict[str, int] = {}
    for name, size in sizes.items():
        class_name = type(modules[name]).__name__ if name in modules else ""
        if name and class_name in undivided:
            first_of_class.setdefault(class_name, size)
    parents = {name.rpartition(".")[0] for name in sizes if "." in name}
    inner = {name: size for name, size in sizes.items() if name in parents or name == ""}
    grandparents = {name.rpartition(".")[0] for name in inner if "." in name}
    # Modules with tensors, and without further modules.
    layers = [size for name, size in inner.items() if name and name not in grandparents]
    mean = int(sum(layers) / max(len(layers), 1))
    return int(1.25 * max([mean, *first_of_class.values()]))


def budget_of(
    memory_budget: int | str | None, max_memory: MaxMemory | None, main: torch.device, chosen_here: bool
) -> int | None:
    """Return the budget as asked for, else the main device's share of ``max_memory``; None: what a few
    blocks take.

    ``chosen_here``: the device map was made for what is free, which on a CPU is then the budget.

    Raises:
        ConfigError: it is no size.
    """
    if memory_budget is not None:
        budget = bytes_of(memory_budget, "memory_budget")
        if not budget:
            raise ConfigError(
                "memory_budget=0 leaves no memory for weights. Pass at least the size of one block."
            )
        return budget
    if max_memory is not None:
        return get_max_memory(max_memory).get(_key(main))
    return free_host_bytes() if chosen_here and main.type == "cpu" else None


def for_streaming(
    budget: int | None, placements: list[TensorPlacement], streamed: list[TensorPlacement], main: torch.device
) -> int | None:
    """Return what a budget leaves for streamed weights beside those that stay on the main device.

    Raises:
        OffloadError: it leaves nothing.
    """
    if budget is None:
        return None
    moving = {id(placement) for placement in streamed}
    staying = sum(
        placement.ref.tensor.nbytes
        for placement in placements
        if id(placement) not in moving and placement.device == main and not placement.on_disk
    )
    if staying > budget or (streamed and staying == budget):
        raise OffloadError(
            f"The budget of {budget} bytes on {main} is less than the {staying} bytes of weights that stay "
            "there. Raise the budget, or place more weights on the disk."
        )
    return budget - staying


def _key(device: torch.device) -> DeviceName:
    return device.type if device.type in ("cpu", "mps") else device.index or 0
