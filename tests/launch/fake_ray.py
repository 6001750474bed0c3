"""A stand-in for the package ``ray``: records what is asked of it, and runs actors as threads of this process."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Asked:
    """What the launcher asked of Ray, in Ray's words."""

    init: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    actors: list[dict[str, Any]] = field(default_factory=list)
    bundles: list[dict[str, float]] = field(default_factory=list)
    shut_down: bool = False


class Actor:
    """An instance whose calls run in two threads; ``kill`` ends the process that it has started, as Ray's would."""

    def __init__(self, instance: Any) -> None:
        self.instance, self.pool = instance, ThreadPoolExecutor(2)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.instance, name)
        return types.SimpleNamespace(remote=lambda *arguments: self.pool.submit(method, *arguments))


def kill(actor: Actor) -> None:
    if actor.instance._process is not None:
        actor.instance._process.kill()
        actor.instance._process.wait()


def install(monkeypatch: Any, resources: dict[str, float]) -> Asked:
    """Put the stand-in where ``import ray`` finds it; ``resources`` are those of the cluster."""
    asked = Asked()

    def init(**arguments: Any) -> None:
        asked.init = arguments
        asked.environment = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}

    def remote(**options: Any) -> Callable[[type], Any]:
        def make() -> Actor:
            asked.actors.append(options)
            return Actor(kind())

        kind: Any = None

        def of(given: type) -> Any:
            nonlocal kind
            kind = given
            return types.SimpleNamespace(options=lambda **_: types.SimpleNamespace(remote=make))

        return of

    def placement_group(bundles: list[dict[str, float]], strategy: str) -> Any:
        asked.bundles = bundles
        done: Future[bool] = Future()
        done.set_result(True)
        return types.SimpleNamespace(ready=lambda: done, bundle_specs=bundles)

    def get(value: Any) -> Any:
        return [one.result() for one in value] if isinstance(value, list) else value.result()

    def first(calls: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        done, rest = wait(calls, timeout, "FIRST_COMPLETED")
        return list(done), list(rest)

    ray: Any = types.ModuleType("ray")
    ray.init, ray.remote, ray.get, ray.wait, ray.kill = init, remote, get, first, kill
    ray.cluster_resources, ray.get_gpu_ids = lambda: resources, list
    ray.shutdown = lambda: setattr(asked, "shut_down", True)
    ray.util = types.SimpleNamespace(
        get_node_ip_address=lambda: "127.0.0.1",
        placement_group=placement_group,
        remove_placement_group=lambda group: None,
    )
    ray.get_runtime_context = lambda: types.SimpleNamespace(get_node_id=lambda: "node")
    strategies: Any = types.ModuleType("ray.util.scheduling_strategies")
    strategies.PlacementGroupSchedulingStrategy = lambda group, number: None
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util", ray.util)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    return asked
