"""The table of formats in ``docs/importing-checkpoints.md``, from what becomes of each recorded checkpoint.

``python -m tests.site`` writes it anew. ``tests/compat/checkpoints`` compares the same checkpoints with what the live
objects held.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from lockstep.checkpoint.weights import open_weights, write_file
from lockstep.compat.checkpoints import ImportedState, read_foreign
from lockstep.errors import CheckpointError

PAGE = Path(__file__).parents[1] / "docs" / "importing-checkpoints.md"
FIXTURES = Path(__file__).parent / "compat" / "checkpoints" / "fixtures"
HEAD = ["format", "written by", "weights", "optimizer", "besides"]

FORMATS = {
    "weights": "`torch.save` of a `state_dict()`",
    "legacy": "the same, in the form of torch before 1.6",
    "training": "`torch.save` of a script's dict",
    "sharded": "weights in numbered files",
    "accelerate": "`save_state`, safetensors",
    "accelerate-bin": "`save_state`, pickled weights",
    "accelerate-zero3": "`save_state` with DeepSpeed, ZeRO stage 3, 2 ranks",
    "trainer": "`checkpoint-N` of the Trainer",
    "fsdp2-sharded": "Accelerate's FSDP2, `SHARDED_STATE_DICT`, 2 ranks",
    "fsdp2-full": "Accelerate's FSDP2, `FULL_STATE_DICT`, 2 ranks",
    "fsdp2-ranks": "`torch.save` by each of 2 ranks of FSDP2",
    "fsdp2-one-rank": "`torch.save` by the only rank of FSDP2",
    "dcp": "`torch.distributed.checkpoint`, 2 ranks",
    "dcp-safetensors": "`HuggingFaceStorageWriter(save_distributed=True)`, 2 ranks",
    "dcp-safetensors-joined": "the same with `enable_consolidation=True`",
    "dcp-safetensors-default": "`HuggingFaceStorageWriter()`, 2 ranks",
    "zero1": "DeepSpeed, ZeRO stage 1, 2 ranks",
    "zero1-bf16-optimizer": "the same with bf16 weights and fp32 gradients",
    "zero2-bf16": "DeepSpeed, ZeRO stage 2, bf16, 2 ranks",
    "zero3": "DeepSpeed, ZeRO stage 3, 2 ranks",
    "universal-zero1": "`ds_to_universal.py`, from ZeRO stage 1",
    "universal-zero3": "`ds_to_universal.py`, from ZeRO stage 3",
    "autotp": "DeepSpeed's AutoTP, 2 tensor ranks",
    "universal-autotp": "`ds_to_universal.py`, from AutoTP",
    "megatron": "Megatron's `torch_dist`, 2 ranks",
}
"""The recorded checkpoints, in the order of the table."""

CONVERTED = [name for name in FORMATS if name.startswith("dcp-safetensors")]
"""Those that need no import: ``lockstep checkpoint convert`` reads them."""


def source(case: str) -> Path:
    """The checkpoint of a case: a folder, or its only file."""
    folder = FIXTURES / case / "checkpoint"
    found = (path for path in (FIXTURES / case).iterdir() if "expected" not in path.name)
    return folder if folder.exists() else next(found)


def converted(case: str, folder: Path) -> Path:
    """The file that the weights of a case become."""
    return Path(write_file(open_weights(str(source(case))), f"{folder}/model.safetensors", replace=False))


def rows() -> list[list[str]]:
    """What is read of each checkpoint, or what is said of it."""
    found = []
    for case, title in FORMATS.items():
        expected = json.loads((FIXTURES / case / "expected.json").read_text(encoding="utf-8"))
        written = ", ".join(f"{name} {version}" for name, version in expected["written by"].items())
        found.append([title, written, *_cells(case)])
    return found


def _cells(case: str) -> list[str]:
    try:
        if case in CONVERTED:
            with tempfile.TemporaryDirectory() as folder:
                converted(case, Path(folder))
            return ["whole, by `lockstep checkpoint convert`", "", ""]
        return _parts(read_foreign(source(case)))
    except CheckpointError as error:
        advice = str(error).replace(str(source(case)), "the folder").rpartition(". ")[2]
        return [f"refused: {advice}", "", ""]


def _parts(state: ImportedState) -> list[str]:
    named = [all(isinstance(key, str) for key in optimizer["state"]) for optimizer in state.optimizers]
    kinds = {"schedulers": state.schedulers, "loss scale": state.scaler, "registered objects": state.objects}
    kinds |= {"generators": state.rng, "number of steps": state.step, "a script's values": state.other}
    optimizer = ("by name" if all(named) else "by number") if named else ""
    return ["whole", optimizer, ", ".join(name for name, kind in kinds.items() if kind)]
