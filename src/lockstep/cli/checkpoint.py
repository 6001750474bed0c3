"""``lockstep checkpoint``: verify, show, merge, convert and import checkpoints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from lockstep.cli.output import ERROR, print_table, progress
from lockstep.cli.values import IntegerRange
from lockstep.words import escape

if TYPE_CHECKING:
    from lockstep.checkpoint.store.base import Store
    from lockstep.checkpoint.weights.convert import Weights

DAMAGED = 1
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
MOST_ROWS = 40
NUMBERS = ("step", "epoch", "tensors", "elements", "bytes", "ranks", "pieces")

EPILOG = """\b
Examples:
  lockstep checkpoint verify run/checkpoints/checkpoint_3
  lockstep checkpoint show run/checkpoints
  lockstep checkpoint merge run/checkpoints/checkpoint_3 model.safetensors
  lockstep checkpoint convert run/checkpoints/checkpoint_3 weights --dtype bf16
  lockstep checkpoint import-pickle old/pytorch_model.bin imported
"""

VERIFY_EPILOG = """\b
Examples:
  lockstep checkpoint verify run/checkpoints/checkpoint_3
  lockstep checkpoint verify run/checkpoints
  lockstep checkpoint verify --all run/checkpoints
  lockstep checkpoint verify s3://bucket/run/checkpoints
"""

SHOW_EPILOG = """\b
Examples:
  lockstep checkpoint show run/checkpoints
  lockstep checkpoint show run/checkpoints/checkpoint_3 --tensors
  lockstep checkpoint show run/checkpoints/checkpoint_3 --json
"""

MERGE_EPILOG = """\b
Examples:
  lockstep checkpoint merge run/checkpoints/checkpoint_3 model.safetensors
  lockstep checkpoint merge run/checkpoints/checkpoint_3 second.safetensors --model 1
  lockstep checkpoint merge sharded_weights whole_weights
"""

CONVERT_EPILOG = """\b
Examples:
  lockstep checkpoint convert run/checkpoints/checkpoint_3 weights
  lockstep checkpoint convert run/checkpoints/checkpoint_3 weights --dtype bf16 --max-shard-size 5GB
  lockstep checkpoint convert run/checkpoints/checkpoint_3 second_weights --model 1
  lockstep checkpoint convert whole_weights sharded_weights --to weights --max-shard-size 2GB
"""

IMPORT_EPILOG = """\b
Examples:
  lockstep checkpoint import-pickle old/pytorch_model.bin imported
  lockstep checkpoint import-pickle accelerate_run/checkpoint_3 imported
  lockstep checkpoint import-pickle accelerate_run/checkpoint_3 imported --skip custom_checkpoint_0.pkl
"""


class CheckpointCommands(click.Group):
    """Commands on files: what the system says of one is an error in one sentence."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except OSError as error:
            raise click.ClickException(f"{error}. Mend the path or its permissions.") from error


@click.group("checkpoint", epilog=EPILOG, cls=CheckpointCommands)
def command() -> None:
    """Verify, show, merge and convert checkpoints."""


@command.command("verify", epilog=VERIFY_EPILOG)
@click.argument("directory", metavar="DIR")
@click.option(
    "--all", "every", is_flag=True, help="In a folder of checkpoints, verify the older ones as well."
)
@click.pass_context
def verify_command(ctx: click.Context, directory: str, every: bool) -> None:
    """Compare every file of the checkpoint DIR with its hash.

    For a project, or its folder of numbered checkpoints, the newest one is verified first, then older ones until one is
    whole. A resumed run would load that one. The exit code is 0 if all verified checkpoints are whole, otherwise 1.
    Files that were added to a checkpoint later are listed, and do no harm.
    """
    from lockstep.checkpoint.store import store_for
    from lockstep.checkpoint.summary import checkpoints_in
    from lockstep.errors import CheckpointError

    store, path = store_for(directory)
    places = checkpoints_in(store, path)
    whole: list[str] = []
    failed = False
    for place in places:
        if whole and not every:
            break
        try:
            _verify(store, place)
            whole.append(place)
        except CheckpointError as error:
            failed = True
            click.echo(f"{ERROR}{error}", err=True)
    if len(places) > 1:
        click.echo(
            f"A resumed run would load {whole[0]}." if whole else "A resumed run would find none to load."
        )
    ctx.exit(DAMAGED if failed else 0)


def _verify(store: Store, directory: str) -> None:
    """Verify one checkpoint and print what was verified."""
    from lockstep.checkpoint.folders import added_files
    from lockstep.checkpoint.store.verify import read_manifest, verify_checkpoint
    from lockstep.config.values import join_names

    total = sum(entry.size for entry in read_manifest(store, directory).files.values())
    with progress(f"verifying {directory}", total) as seen:
        manifest = verify_checkpoint(store, directory, seen=seen)
    files = sorted(manifest.files.items())
    rows = [(name, f"{entry.size:,}", entry.blake3[:16]) for name, entry in files[:MOST_ROWS]]
    if len(files) > MOST_ROWS:
        rows.append((f"and {len(files) - MOST_ROWS} more", "", ""))
    print_table(("file", "bytes", "BLAKE3"), rows, NUMBERS)
    click.echo(f"{escape(directory)}: OK, {len(files)} files of {total:,} bytes are as they were saved.")
    names = added_files(store, directory)
    if names:
        click.echo(
            f"{len(names)} {'file was' if len(names) == 1 else 'files were'} added to it later, which loading passes "
            f"over: {escape(join_names(names))}."
        )


@command.command("show", epilog=SHOW_EPILOG)
@click.argument("directory", metavar="DIR")
@click.option("--tensors", "with_tensors", is_flag=True, help="List every tensor and where its pieces are.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show_command(directory: str, with_tensors: bool, as_json: bool) -> None:
    """Show what the checkpoint DIR holds and how it was saved. For a folder of checkpoints, show a line for each.

    Only the manifest and the index are verified and read, no tensors.
    """
    from lockstep.checkpoint.store import store_for
    from lockstep.checkpoint.summary import checkpoints_in, summarize

    store, path = store_for(directory)
    places = checkpoints_in(store, path)
    if len(places) > 1:
        _show_list(store, places, as_json)
        return
    summary = summarize(store, places[0])
    if as_json:
        click.echo(json.dumps(summary.facts(with_tensors), indent=2))
        return
    saved = summary.manifest.saved
    facts = {
        "saved": saved.time,
        "ranks": saved.world_size,
        "parallel": saved.parallel or "none",
        **saved.settings,
        **saved.versions,
        "holds": ", ".join(f"{count} {kind}" for kind, count in summary.contents.items()) or "nothing",
    }
    click.echo(escape(summary.directory))
    print_table(("", ""), [(name, str(value)) for name, value in facts.items()])
    groups = [
        (
            group.name,
            f"{group.tensors:,}",
            f"{group.elements:,}",
            f"{group.nbytes:,}",
            ", ".join(f"{dtype} {size:,}" for dtype, size in sorted(group.bytes_by_dtype.items())),
        )
        for group in summary.groups
    ]
    print_table(("of", "tensors", "elements", "bytes", "bytes by dtype"), groups, NUMBERS)
    files = [(name, f"{entry.size:,}") for name, entry in sorted(summary.manifest.files.items())]
    print_table(("file", "bytes"), files, NUMBERS)
    if with_tensors:
        rows = [
            (name, entry.dtype, str(list(entry.shape)), str(len(entry.pieces)),
             ", ".join(sorted({chunk.file for chunk in entry.pieces})))
            for name, entry in sorted(summary.index.items())
        ]  # fmt: skip
        print_table(("tensor", "dtype", "shape", "pieces", "files"), rows, NUMBERS)


def _show_list(store: Store, places: list[str], as_json: bool) -> None:
    """Print one line for each checkpoint, the newest first."""
    from lockstep.checkpoint.summary import summarize
    from lockstep.errors import CheckpointError

    rows, facts = [], []
    for place in places:
        try:
            summary = summarize(store, place)
        except CheckpointError as error:
            facts.append({"directory": place, "error": str(error)})
            rows.append((place, "damaged", *[""] * 6))
            click.echo(f"{ERROR}{error}", err=True)
            continue
        saved = summary.manifest.saved
        facts.append(summary.facts(with_tensors=False))
        rows.append(
            (place, saved.time, *(str(saved.settings.get(name, "")) for name in ("step", "epoch")),
             str(saved.world_size), saved.parallel or "none", f"{len(summary.index):,}", f"{summary.nbytes:,}")
        )  # fmt: skip
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    print_table(
        ("checkpoint", "saved", "step", "epoch", "ranks", "parallel", "tensors", "bytes"), rows, NUMBERS
    )


@command.command("merge", epilog=MERGE_EPILOG)
@click.argument("source", metavar="SRC")
@click.argument("out", metavar="OUT")
@click.option("--model", type=IntegerRange(0), help="Number of the model, if the checkpoint has several.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def merge_command(source: str, out: str, model: int | None, force: bool) -> None:
    """Write the weights of SRC, a checkpoint or a folder of sharded weights, as the one file OUT.

    If OUT does not end in .safetensors, it is a folder, and the file in it is model.safetensors.
    A checkpoint is verified first. At most 64 MiB of tensors are in memory at a time.
    """
    from lockstep.checkpoint.weights.convert import write_file

    weights = _opened(source, model, None)
    with progress("writing", weights.nbytes) as seen:
        path = write_file(weights, out, force, seen)
    click.echo(f"Wrote {path}: {len(weights.tensors.index)} tensors of {weights.nbytes:,} bytes.")


@command.command("convert", epilog=CONVERT_EPILOG)
@click.argument("source", metavar="SRC")
@click.argument("out", metavar="OUT")
@click.option("--to", type=click.Choice(["weights"]), default="weights", show_default=True,
              help="Form of OUT: safetensors files as save_model writes them.")  # fmt: skip
@click.option(
    "--max-shard-size", metavar="SIZE", default="10GB", show_default=True, help="Most bytes in a file."
)
@click.option(
    "--dtype", type=click.Choice(list(DTYPES)), help="Dtype of floating-point tensors (default: as saved)."
)
@click.option("--model", type=IntegerRange(0), help="Number of the model, if the checkpoint has several.")
@click.option("--force", is_flag=True, help="Replace weights that are in OUT.")
def convert_command(
    source: str, out: str, to: str, max_shard_size: str, dtype: str | None, model: int | None, force: bool
) -> None:
    """Write the weights of SRC, a checkpoint or a folder of weights, into the folder OUT.

    From a folder of weights, config.json and generation_config.json are copied as well. Integers, and tensors
    of 8 bits and fewer, keep their dtype. A checkpoint is verified first. At most 64 MiB of tensors are in
    memory at a time.
    """
    from lockstep.checkpoint.weights import parse_size
    from lockstep.checkpoint.weights.convert import write_weights_folder

    limit = parse_size(max_shard_size)
    weights = _opened(source, model, dtype)
    with progress("writing", weights.nbytes) as seen:
        files = write_weights_folder(weights, out, limit, force, seen)
    click.echo(
        f"Wrote {len(weights.tensors.index)} tensors of {weights.nbytes:,} bytes to {out}: {', '.join(files)}."
    )


def _opened(source: str, model: int | None, dtype: str | None) -> Weights:
    """Return the weights of ``source``, verified with a progress bar."""
    import torch

    from lockstep.checkpoint.weights.convert import open_weights

    with progress(f"verifying {source}", None) as seen:
        weights = open_weights(source, model, getattr(torch, DTYPES[dtype]) if dtype else None, seen)
    for note in weights.notes:
        click.echo(escape(note), err=True)
    return weights


@command.command("import-pickle", epilog=IMPORT_EPILOG)
@click.argument("source", metavar="SRC")
@click.argument("out", metavar="DST")
@click.option(
    "--skip", multiple=True, metavar="NAME", help="A file or folder in SRC to leave out; repeatable."
)
def import_command(source: str, out: str, skip: tuple[str, ...]) -> None:
    """Read SRC, a pickled checkpoint of another library, and write the checkpoint DST, or a folder of weights.

    SRC is a .bin or .pt file, or a folder of Accelerate, DeepSpeed, FSDP or torch.distributed.checkpoint. Pickles are
    read in a separate process without rights; no code in them is run.
    """
    from lockstep.compat.checkpoints.convert import read_foreign
    from lockstep.compat.checkpoints.result import write_imported
    from lockstep.compat.checkpoints.state import describe_state

    state = read_foreign(source, skip)
    print_table(("part", "number", "became"), describe_state(state))
    write_imported(state, out)
    if state.weights_only:
        click.echo(f"Wrote {out}: weights, as save_model writes them.")
    else:
        click.echo(f"Wrote {out}. Look at it with: lockstep checkpoint show {out}")
