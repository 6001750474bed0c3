"""Accelerate's commands: ``lockstep accelerate ...``, and those of them that Lockstep has under other names."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from lockstep.cli.main import LazyGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.plan.estimate_model import ModelFacts

COMMANDS_OF_ACCELERATE = {
    "launch": ("lockstep.cli.launch", "Run a training script; for it, `import accelerate` means Lockstep."),
    "config": (
        "lockstep.cli.config",
        "Write a configuration file for launch; also config default, config update.",
    ),
    "env": ("lockstep.cli.env", "Show what this machine and installation have."),
    "test": ("lockstep.cli.test", "Check on this machine that distributed training is right."),
    "estimate-memory": ("lockstep.cli.accelerate:estimate_memory", "Count a model's memory by dtype."),
    "merge-weights": ("lockstep.cli.accelerate:merge_weights", "Join sharded weights into one file."),
    "to-fsdp2": ("lockstep.cli.accelerate:to_fsdp2", "Turn a file for FSDP 1 into one for FSDP 2."),
    "tpu-config": ("lockstep.cli.accelerate:tpu_config", "Refused: there are no TPUs here."),
}

EPILOG = """\b
Examples:
  lockstep accelerate launch --num_processes 2 train.py
  lockstep accelerate config default --mixed_precision bf16
  lockstep accelerate merge-weights checkpoint/pytorch_model_fsdp_0 weights
"""


ONE_FILE = 2**50
"""Bytes that no file of weights has."""


@click.group("accelerate", cls=LazyGroup, commands_by_name=COMMANDS_OF_ACCELERATE, epilog=EPILOG)
def command() -> None:
    """The commands of accelerate, with its options in both spellings."""


# -- merge-weights -----------------------------------------------------------------------------------------


@click.command(
    "merge-weights",
    epilog="\b\nExamples:\n  lockstep merge-weights checkpoint/pytorch_model_fsdp_0 weights\n",
)
@click.argument("checkpoint_directory", metavar="DIR")
@click.argument("output_path", metavar="OUT")
@click.option("--unsafe-serialization", is_flag=True, help="Write pytorch_model.bin, a pickle.")
@click.option("--remove-checkpoint-dir", is_flag=True, help="Delete DIR afterwards.")
def merge_weights(
    checkpoint_directory: str, output_path: str, unsafe_serialization: bool, remove_checkpoint_dir: bool
) -> None:
    """Join the sharded weights in DIR into one file in the folder OUT.

    DIR is a folder of FSDP with SHARDED_STATE_DICT, a checkpoint of Lockstep, or a folder of sharded safetensors. See
    also: lockstep checkpoint merge.
    """
    from lockstep.errors import UsageError

    source, out = Path(checkpoint_directory).expanduser(), Path(output_path).expanduser()
    inside = sorted(path.parent.name for path in source.glob("*/.metadata"))
    if inside and not (source / ".metadata").is_file():
        raise UsageError(
            f"{source} is not a folder of sharded weights, but has {', '.join(inside[:3])}. Name one of them."
        )
    if remove_checkpoint_dir and out.resolve().is_relative_to(source.resolve()):
        raise UsageError(f"{out} is in {source}, which --remove-checkpoint-dir deletes. Name another folder.")
    count, path = _merged(source, out, unsafe_serialization)
    click.echo(f"Wrote {path}: {count} tensors.")
    if remove_checkpoint_dir:
        shutil.rmtree(source)


def _merged(source: Path, out: Path, as_pickle: bool) -> tuple[int, Path]:
    """Number of tensors, and the file that has them."""
    from lockstep.checkpoint.weights.convert import open_weights, write_file
    from lockstep.checkpoint.weights.model import write_weights
    from lockstep.compat.checkpoints.convert import read_foreign
    from lockstep.errors import UsageError

    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out) as aside:
        folder = Path(aside) if as_pickle else out
        whole = folder / "model.safetensors"
        if (source / ".metadata").is_file():
            state = read_foreign(source)
            if not state.weights_only:
                raise UsageError(
                    f"{source} holds more than the weights of one model. Use lockstep checkpoint import-pickle."
                )
            write_weights(state.models[0], folder, ONE_FILE)
            count = len(state.models[0])
        else:
            weights = open_weights(str(source))
            write_file(weights, str(whole), True)
            count = len(weights.tensors.index)
        if not as_pickle:
            return count, whole
        import torch
        from safetensors.torch import load_file

        torch.save(load_file(whole), out / "pytorch_model.bin")
        return count, out / "pytorch_model.bin"


# -- estimate-memory ---------------------------------------------------------------------------------------

BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
PRECISIONS = {"float32": "no", "float16": "fp16", "bfloat16": "bf16"}


class DtypesCommand(click.Command):
    """``--dtypes`` takes several words."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words: list[str] = []
        for word in args:
            follows = words[-2:-1] == ["--dtypes"] and words[-1] in BITS
            words += ["--dtypes", word] if follows and word in BITS else [word]
        return super().parse_args(ctx, words)


@click.command(
    "estimate-memory",
    cls=DtypesCommand,
    epilog="\b\nExamples:\n  lockstep estimate-memory path/to/model --dtypes float32 float16\n",
)
@click.argument("model_name", metavar="MODEL")
@click.option(
    "--library-name", type=click.Choice(["transformers", "timm"]), help="The library that builds it."
)
@click.option(
    "--dtypes", type=click.Choice(list(BITS)), multiple=True,
    default=("float32", "float16", "int8", "int4"), help="One or several (default: float32 float16 int8 int4).",
)  # fmt: skip
@click.option("--trust-remote-code", is_flag=True, help="Refused: no code of a model is run.")
def estimate_memory(
    model_name: str, library_name: str | None, dtypes: Sequence[str], trust_remote_code: bool
) -> None:
    """Count the memory of MODEL in each dtype: its largest part, the whole, and training with Adam on one process.

    MODEL is a folder or config.json of transformers, a name on the Hugging Face Hub, weights in files, or module:Class.
    No weights are made or read. See also: lockstep estimate, which compares ways to train.
    """
    from lockstep.cli.output import print_table
    from lockstep.errors import UsageError
    from lockstep.plan.estimate import Limits, training_rows
    from lockstep.words import memory_text

    if trust_remote_code:
        raise UsageError(
            "--trust-remote-code asks to run code that comes with a model, which this command never does. Name "
            "the model's class as path/to/file.py:Class."
        )
    facts = _facts(model_name, library_name)
    elements = facts.count + sum(facts.buffers.values())
    largest = max((sum(group.values()) for group in facts.groups.values()), default=0)
    rows = []
    for dtype in dtypes:
        sizes = [memory_text(count * BITS[dtype] // 8) for count in (largest, elements)]
        trained = "N/A"
        if dtype in PRECISIONS:
            first = training_rows(facts, [1], [PRECISIONS[dtype]], "adam", Limits())[0]
            trained = memory_text(first.device)
        rows.append((dtype, *sizes, trained))
    click.echo(f"Memory for loading {facts.name}: {facts.count:,} parameters")
    print_table(("dtype", "largest part", "total size", "training using Adam"), rows, ())
    for note in facts.notes:
        click.echo(note)


def _facts(name: str, library: str | None) -> ModelFacts:
    from lockstep.errors import MissingExtraError, UsageError
    from lockstep.plan.estimate_load import facts_of

    if library == "timm":
        return facts_of("timm:create_model", {"model_name": name, "pretrained": False})
    if ":" in name or Path(name).expanduser().exists():
        return facts_of(name)
    try:
        from transformers.utils.hub import cached_file
    except ImportError:
        raise MissingExtraError("Finding a model of the Hub", "transformers", "examples") from None
    try:
        found = cached_file(name, "config.json")
    except (OSError, ValueError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise UsageError(
            f"{name[:100]!r} is not a file, a folder or module:Class, and its configuration cannot be read from "
            f"the Hub: {first[:200]} Name a folder with its config.json."
        ) from None
    return facts_of(str(found))


# -- to-fsdp2 ----------------------------------------------------------------------------------------------


@click.command(
    "to-fsdp2",
    epilog="\b\nExamples:\n  lockstep to-fsdp2 --config-file fsdp1.yaml --output-file fsdp2.yaml\n"
    "  lockstep to-fsdp2 --config-file fsdp1.yaml --overwrite\n",
)
@click.option("--config-file", required=True, help="A file of accelerate config for FSDP 1.")
@click.option("--output-file", help="Where to write.")
@click.option("--overwrite", is_flag=True, help="Replace the file that is there.")
def to_fsdp2(config_file: str, output_file: str | None, overwrite: bool) -> None:
    """Turn Accelerate's configuration file for FSDP 1 into one for FSDP 2 that shards in the same way.

    Lockstep reads both. Use this if you need the file for Accelerate. See also: lockstep config convert.
    """
    from lockstep.compat.accelerate.write import converted_to_fsdp2, write_text
    from lockstep.config.yaml_file import read_yaml
    from lockstep.errors import ConfigError

    if output_file is None and not overwrite:
        raise click.UsageError(
            "There is no --output-file. Name one, or replace the file itself by --overwrite."
        )
    target = Path(output_file or config_file)
    file = read_yaml(config_file)
    if target.exists() and not overwrite:
        raise ConfigError(
            f"{target} exists and was left as it is. Use --overwrite, or another --output-file."
        )
    text, notes = converted_to_fsdp2(file)
    write_text(target, text)
    for note in notes:
        click.echo(note, err=True)
    click.echo(f"Wrote {target}.")


@click.command("tpu-config", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def tpu_config(arguments: tuple[str, ...]) -> None:
    """Refused: TPUs are not supported."""
    raise click.ClickException("tpu-config sets up TPUs, which are not supported. Use GPUs or CPUs.")
