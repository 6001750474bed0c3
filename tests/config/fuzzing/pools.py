"""Raw texts for each setting, as YAML has them, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

WRONG = "<must be refused>"
ANY = "<refused or not>"


def split(*texts: str) -> tuple[str, ...]:
    return tuple(text for several in texts for text in several.split(" | "))


class Raw(NamedTuple):
    """A value as it is written, and what it means; or WRONG, or ANY."""

    text: str
    meaning: Any


@dataclass(frozen=True)
class Pool:
    """What may be said of one setting, and what may not."""

    good: tuple[Raw, ...]
    bad: tuple[str, ...]


@dataclass
class Input:
    """Something to read: of a file its ``content``, of a command line ``argv``.

    ``means`` has the meaning of what was said by name; ``wrong`` is True where something in it must be refused.
    """

    kind: str
    content: bytes = b""
    argv: list[str] = field(default_factory=list)
    means: dict[str, Any] = field(default_factory=dict)
    wrong: bool = False

    def settings(self, name: str, raw: Raw) -> str:
        """Note what a raw text means; the text."""
        if raw.meaning == WRONG:
            self.wrong = True
        elif raw.meaning != ANY:
            self.means[name] = raw.meaning
        return raw.text


def words(good: dict[str, Any], *bad: str) -> Pool:
    """Texts with their meanings, and ``bad`` ones, of which a string may have several: ``"a | b"``."""
    return Pool(tuple(Raw(*item) for item in good.items()), split(*bad))


NOT_NUMBERS = split(
    r"""1_0 | '1_0' | "\n" | "a\nb" | "\e[31m" | 1.5 | two | true | [1] | {a: 1} | 1e3 | '٣' | .nan | .inf | -.inf""",
    r"""1:30:00 | '0x10' | '3 4' | 2024-01-01 | '' | '1;2' | "1\0" | '--2' | '½' | [] | -0x1 | '+ 1'""",
    "1" + "0" * 30,
    "9" * 400,
    "9" * 5000,
)


def integers(*good: int, low: int = 1, high: int = 2**31, more: str = "") -> Pool:
    raws = [Raw(form.format(number), number) for number in good for form in ("{}", "{}", "'{}'", '"{}"')]
    outside = (str(low - 1), str(low - 100), str(high + 1))
    return Pool(tuple(raws), (*NOT_NUMBERS, *outside, *(split(more) if more else ())))


TRUTHS = words(
    dict.fromkeys(("true", "yes", "on", "'true'", "True", "'1'"), True)
    | dict.fromkeys(("false", "no", "off", "'False'", "'0'"), False),
    r"""maybe | "\n" | "a\nb" | 2 | -1 | [true] | {a: true} | 1.0 | tru | 'true false' | .nan | '' | 'ja'""",
)

PRECISION = words(
    {
        "'no'": "no",
        "no": "no",
        "bf16": "bf16",
        "fp16": "fp16",
        "BF16": "bf16",
        "'fp16'": "fp16",
        "fp8": "fp8",
    },
    "tf32 | float16 | half | 16 | [bf16] | {a: bf16} | 'bf16 fp16' | bf-16",
    "\"bf16\\n\" | 1.5 | ''",
)

HOST = words(
    {name: name for name in ("10.0.0.1", "host-1", "node0.cluster.local")} | {"'::1'": "::1"},
    "256.1.1.1 | 10.0.0 | 10.0.0.1.2 | a b | '-oProxyCommand=x' | 'a;b' | $(id) | ''",
    "[a] | a/b | 'u@h' | 'host:22' | \"a\\0b\" | \"a\\nb\" | [true] | 1.5 | '*'",
    "'a..b' | \uff48ost",
    "x" * 300,
)

SECONDS = words(
    {"300": 300.0, "0.5": 0.5, "'12'": 12.0, "1": 1.0},
    "-1 | .inf | .nan | soon | true | [1] | {a: 1} | 'nan' | 'inf' | '1e400' | '1_0'",
    "'٣' | '' | '5 s'",
    "9" * 400,
)

AMOUNT = words(
    {"1.0": 1.0, "0.5": 0.5, "'2'": 2.0, "1": 1.0},
    "-1 | .inf | .nan | much | true | [1] | {a: 1} | 'nan' | '-inf' | 'inf' | 1_0 | '٣'",
    "''",
    "9" * 5000,
)

OBJECT = words(
    {"{type: AdamW, params: {lr: 0.1}}": {"type": "AdamW", "params": {"lr": 0.1}}},
    "AdamW | [AdamW] | {kind: AdamW} | {type: 3} | {type: AdamW, params: [1]}",
    "{type: '', params: {lr: 1}} | 7",
)

PARALLEL_LINES = words(
    {
        "zero=3": {"zero": 3},
        "'zero=2 activation=full'": {"zero": 2, "activation": "full"},
        "ddp": {"strategy": "ddp"},
        "tp=2": {"tp": 2},
        "'zero=3 offload'": {"zero": 3, "offload": "all"},
        "auto": {},
    },
    "zero=4 | zero=-1 | zero= | warp=9 | 'zero=1 zero=2' | tp=0 | 'ddp zero=1'",
    "replicate=2 | hpz=2 | 'zero=1 hpz=2' | zero=1.0 | '=3' | [zero] | 3 | 'zero = 3'",
    "'zero=٣' | 'cp_method=ring cp=1 x' | TP=2",
)

# settings of a run: Lockstep's own file, and the flags of `lockstep launch` by the same names
RUN: dict[str, Pool] = {
    "num_processes": integers(1, 2, 4, 6, 8, 12, 24),
    "num_machines": integers(1, 1, 1, 2, 3, high=100_000, more="'4:2' | '1:x' | '1:2:3' | ':' | 0:2"),
    "machine_rank": integers(0, 0, 0, 1, 2, low=0),
    "main_process_ip": HOST,
    "main_process_port": integers(1, 29500, 65535, low=0, high=65535, more="http | '29500/tcp'"),
    "rdzv_backend": words({"static": "static", "c10d": "c10d"}, "etcd | 1 | true | [static] | '' | {a: 1}"),
    "interface": words(
        {"eth0": "eth0", "ib0": "ib0", "'enp0s3.7'": "enp0s3.7"},
        "'a b' | '-x' | 'eth0;id' | [eth0] | '' | abcdefghijklmnopq | [1] | \"a\\nb\"",
    ),
    "max_restarts": integers(0, 3, 10, low=0),
    "hang_timeout": SECONDS,
    "grace": SECONDS,
    "watch": TRUTHS,
    "mixed_precision": PRECISION,
    "use_cpu": TRUTHS,
    "debug": TRUTHS,
    "gpu_ids": words(
        {"all": "all", "'0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23'": ANY},
        "'0,0' | '-1' | a | 1.5 | true | {a: 1} | '0,,1' | '0;1' | [0, 0] | '' | [true]",
    ),
    "gradient_accumulation_steps": integers(1, 2, 64),
    "parallel": PARALLEL_LINES,
    "gradient_clipping": AMOUNT,
    "micro_batch_size": integers(1, 16),
    "optimizer": OBJECT,
    "scheduler": OBJECT,
    "grad_scaler": words(
        {"{init_scale: 1024}": {"init_scale": 1024.0}},
        "{scale: 1} | [1] | 7 | {init_scale: -1} | {growth_interval: 0}",
        "{init_scale: .nan}",
    ),
    "num_cpu_threads_per_process": integers(1, 4),
    "enable_cpu_affinity": TRUTHS,
    "role": words({"trainer": "trainer", "a.b-c_1": "a.b-c_1"}, "'a b' | '' | [a] | \"a\\nb\" | {a: 1}"),
    "monitor_interval": words({"0.1": 0.1, "5": 5.0, "'2'": 2.0}, "0 | -1 | .inf | soon | [1] | 4000"),
    "rdzv_conf": words(
        {
            "{join_timeout: 60}": ANY,
            "'timeout=60,last_call_timeout=2,heartbeat_timeout=5'": ANY,
            "'rdzv_backend=c10d,rdzv_endpoint=host1:29500,timeout=900'": {"join_timeout": 900.0},
        },
        "x | {read_timeout: 1} | {heartbeat_timeout: 1} | {join_timeout: -1} | {join_timeout: 1, timeout: 2} | [1]",
        "7",
    ),
    "dynamo_backend": words(
        {"inductor": "inductor", "INDUCTOR": "inductor", "'no'": "no"},
        "indctor | '1' | [eager] | 'a b' | {a: 1}",
    ),
    "dynamo_mode": words(
        {"default": "default", "max-autotune": "max-autotune"}, "fast | '1' | [default] | ''"
    ),
    "dynamo_use_fullgraph": TRUTHS,
    "dynamo_use_dynamic": TRUTHS,
    "dynamo_use_regional_compilation": TRUTHS,
}

# keys that Accelerate writes beside those
ACCELERATE: dict[str, Pool] = {
    "compute_environment": words({"LOCAL_MACHINE": ANY}, "AMAZON_SAGEMAKER | CLOUD | [a] | 1"),
    "downcast_bf16": words({"'no'": ANY, "no": ANY}, "[1"),
    "main_training_function": words({"main": ANY, "train": "warned"}, "}"),
    "same_network": words({"true": ANY}, "]"),
    "tpu_env": words({"[]": ANY}, "[!!python/name:os.system ]"),
    "tpu_use_cluster": words({"false": ANY}, "true"),
    "tpu_use_sudo": words({"false": ANY}, "true"),
    "megatron_lm_config": words({"{}": ANY}, "{megatron_lm_tp_degree: 2}"),
    "fp8_config": words({"{}": ANY}, "{backend: TE}"),
    "dynamo_config": words(
        {
            "{}": ANY,
            "{dynamo_backend: 'NO'}": ANY,
            "{dynamo_backend: INDUCTOR, dynamo_use_dynamic: true}": ANY,
            "{backend: eager, mode: max-autotune, use_fullgraph: false}": ANY,
        },
        "{dynamo_backend: INDUCTR} | {dynamo_mod: default} | {dynamo_mode: fast}",
        "{dynamo_use_dynamic: maybe} | [1]",
    ),
}

FSDP: dict[str, Pool] = {
    "fsdp_version": words({"1": ANY, "2": ANY}, "3 | x | [1]"),
    "fsdp_sharding_strategy": words(
        {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "1": 3, "2": 2}, "HALF_SHARD | 9 | [FULL_SHARD] | 1.5 | true"
    ),
    "fsdp_auto_wrap_policy": words({"TRANSFORMER_BASED_WRAP": ANY, "SIZE_BASED_WRAP": ANY}, "MAGIC_WRAP | 7"),
    "fsdp_offload_params": words({"true": "all", "false": ANY}, "maybe | [true] | 7"),
    "fsdp_forward_prefetch": words({"true": True, "false": ANY}, "maybe | {a: 1}"),
    "fsdp_state_dict_type": words(
        {"SHARDED_STATE_DICT": ANY, "FULL_STATE_DICT": ANY}, "SOME_STATE_DICT | []x"
    ),
    "fsdp_activation_checkpointing": words({"true": "full", "false": ANY}, "often | [1]"),
    "fsdp_use_orig_params": words({"true": ANY, "false": "warned"}, "[1"),
    "fsdp_xla": words({"false": ANY}, "true"),
}
FSDP_SAYS = {
    "fsdp_sharding_strategy": "zero",
    "fsdp_offload_params": "offload",
    "fsdp_forward_prefetch": "forward_prefetch",
    "fsdp_activation_checkpointing": "activation",
}

DEEPSPEED: dict[str, Pool] = {
    "zero_stage": words({"1": 1, "2": 2, "3": 3, "'3'": 3}, "4 | -1 | x | 1.5 | [2] | true"),
    "offload_optimizer_device": words({"none": ANY, "cpu": "optimizer"}, "nvme | disk | [cpu] | 1.5"),
    "gradient_clipping": words({"1.0": 1.0, "'0.5'": 0.5}, "-1 | .nan | much | [1] | true"),
    "gradient_accumulation_steps": integers(1, 4),
    "zero3_init_flag": words({"false": ANY, "true": "warned"}, "{a"),
    "zero3_save_16bit_model": words({"false": ANY, "true": ANY}, "{a"),
    "enable_msamp": words({"false": ANY}, "true"),
}
DEEPSPEED_SAYS = {"zero_stage": "zero", "offload_optimizer_device": "offload"}
