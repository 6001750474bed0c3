"""Accelerate's commands: ``lockstep accelerate ...``, and those of them that Lockstep has under other names."""

from __future__ import annotations

from pathlib import Path

import click

from lockstep.cli.main import LazyGroup

# Commands of Accelerate that there are not -> what does the same, or why nothing does.
REFUSED = {
    "estimate-memory": "Use lockstep estimate, which also says what fits.",
    "to-fsdp2": "Lockstep reads files for FSDP 1 as they are. For Accelerate, use accelerate to-fsdp2.",
    "tpu-config": "It sets up TPUs, which are not supported. Use GPUs or CPUs.",
}

COMMANDS_OF_ACCELERATE = {
    "launch": ("lockstep.cli.launch", "Run a training script; for it, `import accelerate` means Lockstep."),
    "config": ("lockstep.cli.config", "Write a configuration file for launch; also config default."),
    "env": ("lockstep.cli.env", "Show what this machine and installation have."),
    "test": ("lockstep.cli.test", "Check on this machine that distributed training is right."),
    "merge-weights": ("lockstep.cli.accelerate:merge_weights", "Join sharded weights into one file."),
    **{name: ("lockstep.cli.accelerate:refused", f"Refused. {why}") for name, why in REFUSED.items()},
}

EPILOG = """\b
Examples:
  lockstep accelerate launch --num_processes 2 train.py
  lockstep accelerate config default --mixed_precision bf16
  lockstep accelerate merge-weights checkpoint/pytorch_model_fsdp_0 weights
"""


@click.group("accelerate", cls=LazyGroup, commands_by_name=COMMANDS_OF_ACCELERATE, epilog=EPILOG)
def command() -> None:
    """Run the commands of accelerate, with its options in both spellings."""


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
    from lockstep.compat.checkpoints.merge import merge_weights as merged

    source, output = Path(checkpoint_directory), Path(output_path)
    path = merged(source, output, not unsafe_serialization, remove_checkpoint_dir)
    click.echo(f"Wrote {path}.")


@click.command("refused", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def refused(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Say what to use instead."""
    name = (ctx.info_name or "").replace("_", "-")
    raise click.ClickException(f"There is no lockstep accelerate {name}. {REFUSED[name]}")
