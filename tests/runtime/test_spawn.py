"""Processes of ``mp.spawn`` train together in a group of the script's own; without one they say that they do not."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.warm_interpreter import WarmInterpreter

SCRIPT = """
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main(rank, port):
    from lockstep import Accelerator

    if port:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator = Accelerator(cpu=True)
    told = any("trains by itself" in str(warning.message) for warning in caught)
    place = f"rank {accelerator.process_index} of {accelerator.num_processes}"
    print(place, "warned" if told else "silent", flush=True)
    accelerator.end_training()
    if port:
        dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(main, args=(PORT,), nprocs=2, start_method="fork")
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("has_group", "expected"),
    [
        (True, ["rank 0 of 2 silent", "rank 1 of 2 silent"]),
        (False, ["rank 0 of 1 warned", "rank 0 of 1 warned"]),
    ],
)
def test_what_a_process_of_spawn_knows(
    warm_interpreter: WarmInterpreter, tmp_path: Path, has_group: bool, expected: list[str]
) -> None:
    (tmp_path / "page.py").write_text(SCRIPT.replace("PORT", str(free_port() if has_group else 0)))
    code, output = warm_interpreter.run(tmp_path / "page.py")
    assert code == 0, output
    assert sorted(line for line in output.splitlines() if line.startswith("rank ")) == expected, output


def test_notebook_launcher_with_one_process_says_nothing(
    warm_interpreter: WarmInterpreter, tmp_path: Path
) -> None:
    (tmp_path / "page.py").write_text(
        "import warnings\n"
        "from lockstep import Accelerator, debug_launcher\n"
        "def main():\n"
        "    with warnings.catch_warnings():\n"
        '        warnings.simplefilter("error")\n'
        "        Accelerator()\n"
        "debug_launcher(main, num_processes=1)\n"
    )
    code, output = warm_interpreter.run(tmp_path / "page.py")
    assert code == 0, output
