"""The loops of Accelerate's guides on FSDP and DeepSpeed, by alias on two processes: as plain torch on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compat.features.sharded_problem import whole
from tests.compat.features.test_features import LAUNCH, SOURCE, results
from tests.compat.processes import start

SCRIPT = Path(__file__).with_name("sharded_guides.py")
EXPECTED: dict[str, Any] = {
    "fsdp_with_whole_state_dicts": whole(epochs=2),
    "fsdp_2": whole(epochs=2),
    "fsdp_merged_weights": whole(),
    "deepspeed_stage_2": whole(accumulation=2, norm=0.1),
    "deepspeed_stage_3_offloaded": whole(epochs=2),
    "evaluated_at_stage_3": whole(lr=0.0),
    "two_accelerators": [whole(seed=1)[0], whole()[1], whole(seed=1)[1]],
}
DEEPSPEED = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_config_file: JSON
  zero3_init_flag: true
distributed_type: DEEPSPEED
fsdp_config: {}
main_process_ip: null
num_machines: 1
num_processes: 2
use_cpu: true
"""
OFFLOADED = {"device": "cpu", "pin_memory": True}
DESCRIBED = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": OFFLOADED,
        "offload_param": OFFLOADED,
        "reduce_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def check(found: dict[str, Any], name: str, expected: Any) -> None:
    for rank in (0, 1):
        losses, *weights = found[f"{name} on {rank}"]
        assert losses == pytest.approx(expected[0], rel=1e-5), name
        for sums, whole_ones in zip(weights, expected[1:], strict=True):
            assert sums is None or sums == pytest.approx(whole_ones, rel=1e-5), name


@pytest.mark.timeout(200)
def test_plugins_of_the_guides_train_as_one_process_does() -> None:
    found = results(start(*LAUNCH, "--as-accelerate", str(SCRIPT), *EXPECTED, PYTHONPATH=SOURCE))
    assert len(found) == 2 * len(EXPECTED)
    for name, expected in EXPECTED.items():
        check(found, name, expected)


@pytest.mark.timeout(200)
def test_a_file_of_the_guides_trains_as_one_process_does(tmp_path: Path) -> None:
    described, config = tmp_path / "ds.json", tmp_path / "deepspeed.yaml"
    described.write_text(json.dumps(DESCRIBED))
    config.write_text(DEEPSPEED.replace("JSON", str(described)))
    launch = (*LAUNCH[:3], "--config_file", str(config), "--num-cpu-threads", "1", "--as-accelerate")
    found = results(start(*launch, str(SCRIPT), "as_the_file_says", PYTHONPATH=SOURCE))
    check(found, "as_the_file_says", whole(warmup=3))
