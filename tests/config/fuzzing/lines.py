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


RANK = words({"0": 0, "1": 1, "3": 3}, "-1 | x | 1.5 | ٣ | 0x1 | 1 2 | true", "9" * 400)
SIZE = words({"1": 1, "2": 2, "4": 4, "8": 8}, "0 | -1 | x | 2.0", "9" * 5000)
VARIABLES: dict[str, Pool] = {
    "RANK": RANK,
    "WORLD_SIZE": SIZE,
    "LOCAL_RANK": words({"0": ANY, "1": ANY}, "-1 | x"),
    "LOCAL_WORLD_SIZE": words({"1": ANY, "2": ANY}, "0 | -1 | x"),
    "GROUP_RANK": words({"0": ANY, "1": ANY}, "-1 | x"),
    "MASTER_ADDR": words(dict.fromkeys(("127.0.0.1", "10.0.0.1", "localhost"), ANY), ""),
    "MASTER_PORT": words({"29500": ANY}, "-1 | 65536 | http | 1.5"),
    "OMPI_COMM_WORLD_RANK": words({"0": ANY, "1": ANY}, "x"),
    "OMPI_COMM_WORLD_SIZE": words({"2": ANY, "4": ANY}, "x"),
    "SLURM_PROCID": words({"0": ANY, "1": ANY}, "x"),
    "SLURM_STEP_NUM_TASKS": words({"2": ANY}, "x"),
    "SLURM_NTASKS_PER_NODE": words({"2": ANY, "2(x3)": ANY, "2(x3),1": ANY}, "x"),
    "LOCKSTEP_MIXED_PRECISION": words(
        {"no": "no", "bf16": "bf16", "FP16": "fp16", "fp8": "fp8"}, "half | 16", " bf", "x" * 9999
    ),
    "LOCKSTEP_USE_CPU": words({"1": True, "true": True, "0": False}, "maybe | 2 | -1"),
    "LOCKSTEP_GRADIENT_ACCUMULATION_STEPS": words({"1": 1, "4": 4}, "0 | -1 | 1.5 | x", "9" * 5000),
    "LOCKSTEP_PARALLEL": words({"zero=3": ANY, "ddp": ANY}, "zero=9 | warp | zero=1 zero=1 | ="),
    "LOCKSTEP_GRADIENT_CLIPPING": words({"1.0": 1.0, "auto": ANY}, "-1 | nan | inf | x"),
    "LOCKSTEP_MICRO_BATCH_SIZE": words({"4": 4}, "0 | -1 | x"),
    "LOCKSTEP_OPTIMIZER": words({'{"type": "AdamW"}': ANY}, 'AdamW | [1] | { | {"type": 1}', "[" * 100_000),
    "LOCKSTEP_GRAD_SCALER": words({'{"init_scale": 8}': ANY}, '{"scale": 8} | {}x | {"init_scale": NaN}'),
    "LOCKSTEP_CONTROL": words(
        {"127.0.0.1:29501": ANY, "[::1]:29501": ANY},
        "127.0.0.1 | 127.0.0.1:0 | 127.0.0.1:x | :29501 | host:70000 | a b:1",
    ),
    "LOCKSTEP_CONTROL_SECRET": words({"ab" * 32: ANY}, "xyz | ab", "ab" * 5000, "٣" * 64),
    "LOCKSTEP_RESTART": words({"0": ANY, "2": ANY}, "-1 | x | 1.5"),
    "ACCELERATE_USE_FSDP": words({"true": ANY, "false": ANY}, "maybe | 2"),
    "FSDP_VERSION": words({"1": ANY, "2": ANY}, "3"),
    "FSDP_SHARDING_STRATEGY": words({"FULL_SHARD": ANY, "2": ANY}, "HALF"),
    "ACCELERATE_USE_DEEPSPEED": words({"true": ANY}, "perhaps"),
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": words({"2": ANY}, "7"),
    "XDG_CONFIG_HOME": words({"/tmp/x": ANY, "relative": ANY}, ""),
    "HOME": words({"/root": ANY, "": ANY, "relative": ANY}, ""),
    "LOCKSTEP_CONFIG_FILE": words({"x.yaml": ANY, "~/x.yaml": ANY, "~nobody_q/x.yaml": ANY}, ""),
}

# wrong alone, or only when their neighbours are there
ALWAYS_READ = tuple(
    name
    for name in VARIABLES
    if name.startswith(("LOCKSTEP_", "ACCELERATE_USE_"))
    and name
    not in ("LOCKSTEP_CONTROL", "LOCKSTEP_CONTROL_SECRET", "LOCKSTEP_RESTART", "LOCKSTEP_CONFIG_FILE")
)
