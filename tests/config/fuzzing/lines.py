"""``parallel`` lines and environments."""

from __future__ import annotations

from tests.config.fuzzing.pools import ANY, Pool, words

WORDS: dict[str, Pool] = {
    "zero": words({"1": 1, "2": 2, "3": 3}, "4 | -1 | x | 1.5 | ٣ | true", "", "9" * 400),
    "replicate": words({"1": 1, "2": 2}, "0 | -2 | x | 1.5", "", "9" * 30),
    "hpz": words({"0": 0, "2": 2}, "-1 | x | 2.0"),
    "reduce": words({"fp32": "fp32", "bf16": "bf16"}, "fp8 | 32 | int8"),
    "offload": words({"true": "all", "false": "none", "optimizer": "optimizer"}, "maybe | 2 | disk"),
    "offload_to": words({"cpu": "cpu", "/scratch": "/scratch"}, "nvme | disk", ""),
    "forward_prefetch": words({"true": True, "no": False}, "often"),
    "sync_batchnorm": words({"true": True, "no": False}, "often"),
    "activation": words({"none": "none", "full": "full", "offload": "offload"}, "some | FULL_ON | 1"),
    "tp": words({"1": 1, "2": 2, "4": 4}, "0 | -1 | x | 1e3", "9" * 5000),
    "pp": words({"1": 1, "2": 2}, "0 | -1 | x"),
    "cp": words({"1": 1, "2": 2}, "0 | -1 | x"),
    "ep": words({"1": 1, "2": 2}, "0 | -4 | x"),
    "schedule": words({"1f1b": "1f1b", "gpipe": "gpipe"}, "2f2b | 1F1B!"),
    "micro_batches": words({"4": 4, "8": 8}, "-1 | x | 1.5"),
    "stages_per_rank": words({"1": 1, "2": 2}, "-1 | x"),
    "batch_dims": words(
        {"ids=0": ("ids=0",), "ids=1,pos=none": ("ids=1", "pos=none"), "batch.mask=0": ANY},
        "ids | ids= | ids=x | ids=-1 | =0 | ids=0,ids=1 | ids=0,,pos=1",
    ),
    "loss": words({"mean": "mean", "sum": "sum", "whole": "whole", "auto": "auto"}, "avg | 1 | Sum!", ""),
    "verify": words(
        {"first_step": "first_step", "off": "off", "every:5": "every:5"},
        "every | every:0 | every:x | every:1.5 | always",
        "9" * 400,
    ),
    "sequence_parallel": words({"true": True, "false": False}, "perhaps"),
    "quantized_weights": words({"int8": "int8"}, "int4 | int2 | fp8"),
    "blocks": words({"Block": ANY, "layers.*": ANY}, ", | a,,b"),
}
