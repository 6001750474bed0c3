"""Configuration files and hostfiles: by grammar, damaged, and hostile."""

from __future__ import annotations

import json
import random
import string
from itertools import pairwise

from lockstep.compat.accelerate import OTHER_KEYS, SECTIONS
from lockstep.config import IN_FILES
from tests.compat import accelerate_examples, deepspeed_examples
from tests.config.fuzzing.pools import (
    ANY,
    Input,
    Pool,
    split,
    words,
)

EXAMPLES = (accelerate_examples.TWO_PROCESSES, accelerate_examples.TWO_MACHINES)


SPECIAL = (
    *(bytes([code]) for code in b"\0\xff:\t{!-%|>'\"\n\r#"),
    b"&a ",
    b"*a",
    b"\xef\xbb\xbf",
    b"\xc2\x85",
)


def damage(source: random.Random, content: bytes) -> bytes:
    """A few bytes changed, left out, doubled or moved."""
    changed = bytearray(content)
    for _ in range(source.choice((1, 1, 1, 2, 3, 8))):
        place = source.randrange(len(changed) + 1)
        match source.randrange(7):
            case 0:
                changed[place : place + 1] = bytes([source.randrange(256)])
            case 1:
                del changed[place : place + source.randint(1, 20)]
            case 2:
                changed[place:place] = source.choice(SPECIAL)
            case 3:
                changed[place:place] = changed[place : place + source.randint(1, 60)]
            case 4:
                lines = changed.splitlines(keepends=True)
                source.shuffle(lines)
                changed = bytearray(b"".join(lines))
            case 5:
                changed[place : place + 1] = bytes([source.randrange(32, 127)])
            case _:
                changed = changed[:place]
        if not changed:
            break
    return bytes(changed)


JUNK = (
    *split(
        "abc | -4 | 0 | 1e9 | [] | {} | '' | null | true | 0x10 | 1:30 | *a | &a | !!set | no | ' | \"\\x\" | é | \\"
    ),
    *split(
        "2001-01-01 | .inf | [[ | {fsdp_version: 2} | {zero_stage: 2} | {dp_shard_size: 2} | zero=3 | {zero: 3}"
    ),
    *("{type: SGD}", "? ", "<<", "|", ">", "%", "@", "`", "\u2028", "٣", "1_0", "9" * 400),
)


def change_lines(source: random.Random, text: str) -> str:
    """A few lines with another value or key, said twice, indented, or with junk in the middle."""
    lines = text.splitlines()
    for _ in range(source.randint(1, 3)):
        number = source.randrange(len(lines))
        key, _, value = lines[number].partition(": ")
        match source.randrange(6):
            case 0:
                lines[number] = f"{key}: {source.choice(JUNK)}"
            case 1:
                cut = source.randrange(len(lines[number]) + 1)
                lines[number] = lines[number][:cut] + source.choice(JUNK) + lines[number][cut:]
            case 2:
                lines.insert(source.randrange(len(lines)), lines[number])
            case 3:
                lines[number] = " " * source.randint(1, 3) + lines[number]
            case 4:
                lines[number] = f"{source.choice(lines).partition(': ')[0]}: {value}"
            case _:
                lines[number] = f"{source.choice([*OTHER_KEYS, *SECTIONS, *IN_FILES])}: {source.choice(JUNK)}"
    return "\n".join(lines)


def damaged_yaml(source: random.Random) -> Input:
    return Input("damaged YAML", content=damage(source, source.choice(EXAMPLES).encode()))


def changed_yaml(source: random.Random) -> Input:
    return Input("damaged YAML", content=change_lines(source, source.choice(EXAMPLES)).encode())


TAGS = split(
    "!!python/object/apply:os.system ['true'] | !!python/name:os.system | !!binary aGk= | !x 2 | !!set {a, b}",
    "!!omap [a: 1] | !!python/tuple [1] | !!int two | !!float '٣' | !!bool x | !!null 3x | !!timestamp x",
    "!<tag:yaml.org,2002:python/none> x",
)


def bomb(depth: int) -> str:
    """A list of aliases of lists of aliases: 9 to the power of ``depth`` items."""
    names = string.ascii_lowercase[: depth + 1]
    lists = (f"{name}: &{name} [{', '.join(['*' + of] * 9)}]\n" for of, name in pairwise(names))
    return "a: &a [x, x, x]\n" + "".join(lists)


HOSTILE_YAML: tuple[str | bytes, ...] = (
    *(f"num_processes: {tag}\n" for tag in TAGS),
    *(bomb(depth) for depth in (2, 10)),
    "num_processes: &a 2\nnum_machines: *a\n",
    "num_processes: " + "[" * 10_000 + "\n",
    "num_processes: " + "[" * 1000 + "]" * 1000 + "\n",
    "num_processes: " + "{a: " * 200 + "1" + "}" * 200 + "\n",
    "".join(f"{'  ' * i}k:\n" for i in range(500)),
    "num_processes: 2\nnum_processes: 3\n",
    "fsdp_config:\n  fsdp_version: 1\n  fsdp_version: 1\ndistributed_type: FSDP\n",
    "num_processes: 2\0\n",
    *("num_processes: " + "9" * digits + "\n" for digits in (100, 4301, 60_000)),
    "num_processes: 0x" + "f" * 5000 + "\n",
    "num_processes: 1e" + "9" * 300 + "\n",
    "x" * 2**20,
    "# " + "x" * 2**20 + "\nnum_processes: 2\n",
    "num_processes: 2\n" * 60_000,
    "".join(f"k{i}: 1\n" for i in range(5000)),
    "[" * 30_000,
    "- num_processes: 2\n",
    "2\n",
    "",
    "---\n",
    "--- {num_processes: 2}\n--- {num_processes: 3}\n",
    "? [a, b]\n: 2\n",
    "? {a: b}\n: 2\n",
    "? \n: 2\n",
    "<<: {num_processes: 2}\n",
    "num_processes: 2".encode("utf-16"),
    "num_processes: 2".encode("utf-32"),
    b"\xff\xfe\x00",
    b"num_processes: \x1b[31m2\n",
    "%YAML 9.9\n---\nnum_processes: 2\n",
    "%TAG ! tag:x,1:\n---\nnum_processes: !y 2\n",
    'num_processes: "\\U00110000"\n',
    "num_processes: 2\n...\n}\n",
    "num_processes: |\n  2\n  3\n",
    "num_processes:\n\t2\n",
    f'"{chr(27)}[2J": 2\n',
    "é" * 20_000 + ": 2\n",
    "num_processes: 1:30\n",
    "main_process_port: 1:30\n",
    "micro_batch_size: 190:20:30\n",
)


# a leaf of a DeepSpeed configuration -> our name for it, and its values
JSON_LEAVES: dict[str, tuple[str, Pool]] = {
    "train_batch_size": (
        "train_batch_size",
        words({"64": 64, '"auto"': ANY}, '0 | -4 | 1.5 | "x" | [8] | true | NaN'),
    ),
    "train_micro_batch_size_per_gpu": (
        "micro_batch_size",
        words({"4": 4, '"auto"': ANY}, '0 | {}x | 1e400 | "4 4"'),
    ),
    "gradient_accumulation_steps": (
        "gradient_accumulation_steps",
        words({"2": 2, '"auto"': ANY}, "0 | -1 | 2.5"),
    ),
    "gradient_clipping": (
        "gradient_clipping",
        words({"1.0": 1.0, "2": 2.0}, '-1 | Infinity | "much" | [1] | 1e999'),
    ),
    "zero_optimization.stage": ("zero", words({"1": 1, "2": 2, "3": 3}, '4 | -1 | "x" | 1.5 | true | [3]')),
    "zero_optimization.overlap_comm": ("", words({"true": ANY})),
    "zero_optimization.offload_optimizer": (
        "offload",
        words(
            {
                '{"device": "cpu"}': "optimizer",
                '{"device": "nvme", "nvme_path": "/scratch"}': "optimizer",
                '{"device": "none"}': ANY,
            },
            '{"device": "nvme"} | {"device": "moon"} | {"devise": "cpu"} | "cpu" | 7',
        ),
    ),
    "zero_optimization.zero_hpz_partition_size": ("hpz", words({"1": ANY}, '-1 | "x" | 1.5')),
    "zero_optimization.mics_shard_size": ("", words({"-1": ANY}, "2 | 8")),
    "bf16.enabled": ("bf16", words({"true": True, "false": False}, '2 | "maybe" | [true] | {}x')),
    "fp16.enabled": ("fp16", words({"false": False}, '3 | "ja"')),
    "fp16.initial_scale_power": ("init_scale", words({"16": 65536.0, "12": 4096.0}, '-1 | 99 | 1.5 | "x"')),
    "optimizer": (
        "optimizer",
        words({'{"type": "AdamW", "params": {"lr": 0.1}}': ANY}, '"AdamW" | [1] | {"type": 3}'),
    ),
    "amp": ("", words({'{"enabled": false}': ANY}, '{"enabled": true}')),
    "elasticity": ("", words({'{"enabled": false}': ANY}, '{"enabled": true}')),
    "steps_per_print": ("", words({"10": ANY})),
    "sparse_gradients": ("", words({"false": ANY}, "true")),
}


def in_json(texts: dict[str, list[str]]) -> bytes:
    """Leaves of each section put together as text, so that values may be what no JSON library writes."""
    sections = [f'"{name}": {{{", ".join(inner)}}}' for name, inner in texts.items() if name]
    return ("{" + ", ".join(texts.get("", []) + sections) + "}").encode()


def damaged_json(source: random.Random) -> Input:
    whole = json.dumps(source.choice((deepspeed_examples.STAGE2, deepspeed_examples.STAGE3))).encode()
    return Input("damaged JSON", content=damage(source, whole))


HOSTILE_JSON = (
    b'{"train_batch_size": 8, "train_batch_size": 16}',
    b'{"zero_optimization": {"stage": 1, "stage": 2}}',
    b'{"gradient_clipping": NaN}',
    b'{"train_batch_size": ' + b"9" * 5000 + b"}",
    b'{"a":' * 2000 + b"1" + b"}" * 2000,
    b"[" * 100_000,
    b'{"zero_optimization": ' + b"[" * 200 + b"]" * 200 + b"}",
    b"[]",
    b'"x"',
    b"",
    b"null",
    b"{} {}",
    b'{"a": 1,}',
    b"// comment\n{}",
    b'{"fp16": {"\\ud800": 1}}',
    b'{"\x1b[31m": 1}',
    b'{"steps_per_print": 10' + b" " * 2**20 + b"}",
    b"\xff\xfe{\x00}\x00",
    b'{"train_batch_size": "' + b"x" * 100_000 + b'"}',
)


WRONG_LINES = split(
    "w slots=0 | w slots=-1 | w slots=x | w slots= | w slots=1.5 | w slots=99999999999 | w slots=4 slots=4",
    "w cpus=4 | -oProxyCommand=id slots=1 | a;id slots=2 | $(id) slots=2 | w slots = 4 | w slots=٣ | w,x slots=2",
    "256.0.0.1 slots=2 | w\0 slots=2 | \x1b[31mw slots=1 | u@ slots=2 | @h | h/../x | w 4 | \\ | * | w:x | w:0",
    "a" * 500,
)
