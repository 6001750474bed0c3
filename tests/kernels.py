"""The kernels that tests of numbers run on: those of this processor, and fewer of them.

    python -m tests.kernels        # says which run here
    python -m tests.kernels run    # runs the tests of numbers under each set: make test-processors

PyTorch's own kernels are chosen by ``ATEN_CPU_CAPABILITY``, those of oneDNN (products in 16 bits) by
``ONEDNN_MAX_CPU_ISA``, those of MKL (products in fp32) by ``MKL_CBWR``. A processor runs all sets below its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETS: dict[str, tuple[str, dict[str, str]]] = {
    "all": ("", {}),
    "avx2": ("avx2", {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}),
    "avx512": ("avx512f", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx512"}),
    "avx512 fp16": ("avx512_fp16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}),
    "amx": ("amx_tile", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}),
    "none": ("", {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"}),
    "mkl compatible": ("", {"MKL_CBWR": "COMPATIBLE"}),
    "without onednn": ("", {"TESTS_WITHOUT_ONEDNN": "1"}),
}
"""Name -> the flag that a processor must have, and the variables that choose the set."""
PATHS = (
    "verify",
    "frozen",
    "parallel/test_parity.py",
    "parallel/test_split_parity.py",
    "parallel/test_split_runs.py",
    "parallel/zero/test_parity.py",
    "parallel/optimizers",
    "offload",
    "train",
    "examples",
)
SMALL = """
import tests, torch
a = torch.ones(64, 64).bfloat16()
a @ a
print("aten", torch.backends.cpu.get_cpu_capability())
"""


def cpu_info(key: str) -> str:
    """The value that Linux gives for the first core; "" elsewhere."""
    file = Path("/proc/cpuinfo")
    found = re.search(rf"^{key}\s*: (.*)$", file.read_text() if file.exists() else "", re.MULTILINE)
    return found[1].strip() if found else ""


def offered() -> dict[str, dict[str, str]]:
    """The sets that this processor runs: name -> variables."""
    flags = {"", *cpu_info("flags").split()}
    return {name: variables for name, (flag, variables) in SETS.items() if flag in flags}


def describe(variables: dict[str, str] | None = None) -> str:
    """One line: processor, capability of PyTorch's kernels, instruction set of oneDNN's, threads."""
    environment = {**os.environ, **(variables or {}), "ONEDNN_VERBOSE": "1"}
    output = subprocess.run(
        [sys.executable, "-c", SMALL], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout
    aten, isa = (
        re.search(r"^aten (.*)$", output, re.MULTILINE),
        re.search(r",cpu,isa:(.*)$", output, re.MULTILINE),
    )
    mkl, threads = environment.get("MKL_CBWR", "its own choice"), environment.get("OMP_NUM_THREADS", "all")
    return (
        f"kernels: {cpu_info('model name') or 'unknown processor'} (family {cpu_info('cpu family')}, model "
        f"{cpu_info('model')}); PyTorch {aten[1] if aten else '?'}; oneDNN {isa[1] if isa else 'not used'}; "
        f"MKL {mkl}; threads {threads}"
    )


def run() -> int:
    """Run the tests of numbers under each set that is offered; the number of sets that failed."""
    paths = [str(ROOT / "tests" / path) for path in PATHS]
    ended = {}
    for name, variables in offered().items():
        print(f"\n== {name}: {describe(variables)}", flush=True)
        command = [sys.executable, "-m", "pytest", "--numprocesses", "2", "--dist", "worksteal", *paths]
        ended[name] = subprocess.run(command, env={**os.environ, **variables}, check=False).returncode
    print("\n" + "\n".join(f"{name}: {'failed' if code else 'passed'}" for name, code in ended.items()))
    return sum(map(bool, ended.values()))


if __name__ == "__main__":
    if sys.argv[1:] == ["run"]:
        sys.exit(run())
    print(describe(), flush=True)
