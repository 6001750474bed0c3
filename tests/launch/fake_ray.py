"""A stand-in for the package ``ray``: records what is asked of it, and runs the workers as threads of this process."""

from __future__ import annotations

import os
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Asked:
    """What the launcher asked of Ray, in Ray's words."""

    init: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    shut_down: bool = False


class Method:
    def __init__(self, actor: Actor, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, *arguments: Any) -> Any:
        with self._actor.lock:
            return getattr(self._actor.instance, self._name)(*arguments)


class Actor:
    """One call at a time, as an actor of Ray has them."""

    def __init__(self, instance: Any) -> None:
        self.instance, self.lock = instance, threading.Lock()

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)


class Worker(threading.local):
    rank = 0
    world_size = 1
    group = ""


def install(monkeypatch: Any, resources: dict[str, float]) -> Asked:
    """Put the stand-in where ``import ray`` finds it; ``resources`` are those of the cluster."""
    asked, worker = Asked(), Worker()

    def init(**arguments: Any) -> None:
        asked.init = arguments
        asked.environment = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}

    def remote(**_options: Any) -> Callable[[type], Any]:
        return lambda kind: types.SimpleNamespace(remote=lambda *args: Actor(kind(*args)))

    context = types.SimpleNamespace(
        get_world_rank=lambda: worker.rank,
        get_world_size=lambda: worker.world_size,
        get_local_rank=lambda: worker.rank,
        get_local_world_size=lambda: worker.world_size,
        get_node_rank=lambda: 0,
    )

    class TorchTrainer:
        def __init__(self, function: Callable[[dict[str, Any]], None], **arguments: Any) -> None:
            asked.trainer = {"function": function, **arguments}

        def fit(self) -> None:
            failures = asked.trainer["run_config"].failure_config.max_failures
            for round_number in range(failures + 1):
                errors = self._run_once(f"group-{round_number}")
                if not errors:
                    return
            raise errors[0]

        def _run_once(self, group: str) -> list[Exception]:
            count, errors = asked.trainer["scaling_config"].num_workers, []

            def run(rank: int) -> None:
                worker.rank, worker.world_size, worker.group = rank, count, group
                try:
                    asked.trainer["function"](asked.trainer["train_loop_config"])
                except Exception as error:
                    errors.append(error)

            threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return errors

    def record(**values: Any) -> types.SimpleNamespace:
        return types.SimpleNamespace(**values)

    ray: Any = types.ModuleType("ray")
    ray.init, ray.remote, ray.get = init, remote, lambda value: value
    ray.cluster_resources = lambda: resources
    ray.shutdown = lambda: setattr(asked, "shut_down", True)
    ray.util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    ray.get_runtime_context = lambda: types.SimpleNamespace(get_placement_group_id=lambda: worker.group)
    train: Any = types.ModuleType("ray.train")
    train.get_context = lambda: context
    train.ScalingConfig = train.RunConfig = train.FailureConfig = record
    torch: Any = types.ModuleType("ray.train.torch")
    torch.TorchTrainer, torch.TorchConfig = TorchTrainer, type("TorchConfig", (), {})
    part: Any = types.ModuleType("ray.train.backend")
    part.Backend = type("Backend", (), {"share_cuda_visible_devices": False})
    ray.train, train.torch, train.backend = train, torch, part
    for module in (ray, train, torch, part):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "lockstep.launch.ray_cluster.meeting", raising=False)
    return asked
