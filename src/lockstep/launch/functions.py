"""Launching a function instead of a script: from a notebook, or to try something out on CPU processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lockstep.config.settings import SETTINGS, THREADS_VARIABLE
from lockstep.config.sources import export_environment, inherited_environment, restore_environment
from lockstep.config.values import MAX_PORT, parse_integer, parse_precision
from lockstep.errors import ConfigError, UsageError
from lockstep.launch.network import LOOPBACK, free_port
from lockstep.launch.plan import available_cores

USE_CPU = SETTINGS["use_cpu"].variable
# What the rendezvous of torch's agent would take; a function is launched once and not restarted.
UNUSED_BY_DEFAULT = {"rdzv_endpoint": "", "rdzv_conf": None, "max_restarts": 0}


def notebook_launcher(
    function: Callable[..., object],
    args: Sequence[object] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int | None = None,
    master_addr: str | None = None,
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, object] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Run a function on several processes of this machine, from a notebook.

    Processes are forked. A single process is this one, without a fork. With several machines, make the same call on
    each of them.

    Args:
        function: The function. Make the ``Accelerator`` inside of it.
        args: Its positional arguments.
        num_processes: The number of processes on this machine. None: one for each GPU, or one.
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``.
        use_port: The port at which the processes meet. None: a free one.
        master_addr: The address of the machine with rank 0. With several machines, it is the same on all of them, and
            so is ``use_port``.
        node_rank: The number of this machine, from 0.
        num_nodes: The number of machines.
        rdzv_backend: Accepted, without effect.
        rdzv_endpoint: Refused, and so are ``rdzv_conf`` and ``max_restarts``: they need ``lockstep launch``.
        rdzv_conf: See ``rdzv_endpoint``.
        rdzv_id: Accepted, without effect.
        max_restarts: See ``rdzv_endpoint``.
        monitor_interval: Accepted, without effect.
        log_line_prefix_template: Accepted, without effect.

    Raises:
        ConfigError: an argument is out of range, or one is refused.
        UsageError: this process already uses a GPU or belongs to a process group, and cannot be forked.
        torch.multiprocessing.ProcessRaisedException: a process failed. It has the traceback of the first one.

    Examples:
        ```python
        from lockstep import Accelerator, notebook_launcher

        def train(lr: float) -> None:
            accelerator = Accelerator(cpu=True)
            accelerator.print(f"{accelerator.num_processes} processes, lr {lr}")

        notebook_launcher(train, args=(0.1,), num_processes=2)
        ```
    """
    given = {"rdzv_endpoint": rdzv_endpoint, "rdzv_conf": rdzv_conf, "max_restarts": max_restarts}
    for name, default in UNUSED_BY_DEFAULT.items():
        if given[name] != default and given[name] is not None:
            raise ConfigError(
                f"{name}={given[name]!r} is an option of `lockstep launch` only. Put the function in a script "
                "and use `lockstep launch`."
            )
    if not callable(function):
        kind = type(function).__name__
        raise ConfigError(f"function is a {kind}. Pass a function, with its arguments in args=(...).")
    precision = parse_precision(mixed_precision, "mixed_precision")
    nodes = parse_integer(num_nodes, "num_nodes", at_least=1)
    node = parse_integer(node_rank, "node_rank", at_least=0, at_most=nodes - 1)
    nproc = (
        _default_processes() if num_processes is None else parse_integer(num_processes, "num_processes", 1)
    )
    if nodes > 1 and (master_addr is None or use_port is None):
        raise ConfigError(
            f"num_nodes is {nodes} but master_addr or use_port is missing. Pass the address and the port of node 0."
        )
    environment = {} if precision == "no" else {SETTINGS["mixed_precision"].variable: str(precision)}
    if nproc * nodes == 1:
        _run_here(function, args, environment)
        return
    port = (
        free_port() if use_port is None else parse_integer(use_port, "use_port", 0, MAX_PORT) or free_port()
    )
    environment |= {"MASTER_ADDR": master_addr or LOOPBACK, "MASTER_PORT": str(port)}
    _run_forked(function, args, nproc, nodes, node, environment)


def debug_launcher(
    function: Callable[..., object], args: Sequence[object] = (), num_processes: int = 2
) -> None:
    """Run a function on several processes with CPUs, to test distributed code on any machine. They are forked.

    Args:
        function: The function. Make the ``Accelerator`` inside of it.
        args: Its positional arguments.
        num_processes: The number of processes.

    Raises:
        ConfigError: ``num_processes`` is not a positive integer.
        UsageError: this process belongs to a process group already.
        torch.multiprocessing.ProcessRaisedException: a process failed. It has the traceback of the first one.

    Examples:
        ```python
        from lockstep import Accelerator, debug_launcher

        def check() -> None:
            accelerator = Accelerator()
            assert accelerator.num_processes == 2

        debug_launcher(check, num_processes=2)  # raises what a process raised
        ```
    """
    nproc = parse_integer(num_processes, "num_processes", at_least=1)
    environment = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port()), USE_CPU: "true"}
    _run_forked(function, args, nproc, 1, 0, environment)


def _default_processes() -> int:
    import torch

    return max(1, torch.cuda.device_count())


def _run_here(function: Callable[..., object], args: Sequence[object], environment: dict[str, str]) -> None:
    before = inherited_environment()
    export_environment(environment)
    try:
        function(*args)
    finally:
        restore_environment(before)


def _run_forked(
    function: Callable[..., object],
    args: Sequence[object],
    nproc: int,
    nodes: int,
    node: int,
    environment: dict[str, str],
) -> None:
    import torch
    import torch.distributed as dist
    from torch.multiprocessing.spawn import start_processes

    if dist.is_available() and dist.is_initialized():
        raise UsageError(
            "this process already belongs to a process group, which its children cannot share. Restart the "
            "notebook, and create the Accelerator inside the function only."
        )
    if torch.cuda.is_initialized() and environment.get(USE_CPU) != "true":
        raise UsageError(
            "CUDA was already used in this process, so it cannot be forked. Restart the notebook, and create the "
            "Accelerator and move tensors to a GPU inside the function only."
        )
    shared = {THREADS_VARIABLE: str(max(1, available_cores() // nproc)), **environment}
    start_processes(
        _worker,
        args=(function, tuple(args), nproc, nodes, node, shared),
        nprocs=nproc,
        join=True,
        # Forked: the function may be in a notebook's cell, which no child could import.
        start_method="fork",
    )


def _worker(
    local_rank: int,
    function: Callable[..., object],
    args: tuple[object, ...],
    nproc: int,
    nodes: int,
    node: int,
    environment: dict[str, str],
) -> None:
    import torch

    from lockstep.runtime import process

    ranks = {
        "RANK": str(node * nproc + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(nproc * nodes),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": str(node),
    }
    # One process is not distributed.
    export_environment(environment | ranks if nproc * nodes > 1 else environment)
    # What the parent found out about itself does not hold here.
    process.end_runtime()
    # OpenMP read the parent's setting long ago.
    torch.set_num_threads(int(environment[THREADS_VARIABLE]))
    function(*args)
    process.end_runtime()
