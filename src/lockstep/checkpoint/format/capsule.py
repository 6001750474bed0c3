"""The capsule of one step: what it takes to make it again, in files of JSON and safetensors.

A capsule is a folder. ``capsule.json`` tells of the step; ``rank-<n>.json`` and ``rank-<n>.safetensors`` hold the
micro-batches that rank n trained on, with the states of its generators before each; ``weights`` is a checkpoint of the
models alone, as they were before the step. Nothing in it is a pickle.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lockstep.checkpoint.format.codec import decode, encode
from lockstep.config.files import check_plain_file, read_plain_file
from lockstep.errors import CheckpointError, ConfigError

FORMAT = "lockstep capsule 1"
FACTS = "capsule.json"
WEIGHTS = "weights"
LARGEST_JSON_BYTES = 256 << 20
UNREADABLE = (OSError, CheckpointError, ValueError, RecursionError)
"""What reading a file raises that is not there, torn, or of other contents than it should be."""


@dataclass(frozen=True)
class CapsuleFacts:
    """What all ranks know of the step.

    Attributes:
        step: Its number in the run, from 1.
        kind, value, score: Of the spike; ``kind`` is loss or gradient_norm.
        loss, gradient_norm: Of the step over all ranks; None: not looked at.
        history: (median, MAD) of the steps before, by kind.
        data_ranks: Of each rank, whose batches it trained on.
        loss_scale: With fp16.
        threads: Of one operator of torch.
        checkpoint: The newest complete one, or "".
        steps_since: Steps between that and this one.
        has_weights: Whether the weights are here.
    """

    step: int
    kind: str
    value: float
    score: float
    loss: float | None = None
    gradient_norm: float | None = None
    history: dict[str, tuple[float, float]] = field(default_factory=dict)
    epoch: int | None = None
    samples: int | None = None
    data_ranks: tuple[int, ...] = (0,)
    parallel: str = ""
    mixed_precision: str = "no"
    accumulation_steps: int = 1
    loss_scale: float | None = None
    device: str = "cpu"
    threads: int = 1
    checkpoint: str = ""
    steps_since: int | None = None
    has_weights: bool = False
    torch: str = ""

    def write(self, folder: Path) -> None:
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=2)
        (folder / FACTS).write_text(text + "\n", "utf-8")

    @classmethod
    def read(cls, folder: Path) -> CapsuleFacts:
        """Read the tensors of a capsule. Raises ConfigError: ``folder`` is none."""
        # With pydantic, which a run may never need.
        from lockstep.checkpoint.format.documents import validated

        try:
            found = _document(folder / FACTS)
            if not isinstance(found, dict) or found.get("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT!r}, so it is of another version of Lockstep")
            return validated(cls, found, FACTS)
        except UNREADABLE as error:
            raise ConfigError(
                f"{folder} is no capsule: {str(error).rstrip('.')}. Name a folder below capsules/ in a run's folder."
            ) from error


def _document(path: Path) -> object:
    # NaN is no JSON, but what the loss of a bad step may be.
    return json.loads(read_plain_file(str(path), LARGEST_JSON_BYTES))


@dataclass
class KeptBatch:
    """A micro-batch as the loader handed it out, and the states of the rank's generators before that.

    ``rows`` and ``real``: of each rank, as ``BatchCounts`` has them; None: not known.
    """

    batch: object
    generators: dict[str, object]
    ends_data: bool = False
    rows: list[int] | None = None
    real: list[int] | None = None


@dataclass
class RankCapsule:
    """What one rank trained on in the step.

    Attributes:
        losses: (loss, weight) of each backward; with weights (weighted sum, sum of weights).
        buffers: Those that had changed since the run began, before the step, by the number of the model and name.
        inexact: Why this is not what the rank trained on, in a sentence; "": it is.
    """

    __pydantic_config__ = {"arbitrary_types_allowed": True}

    batches: list[KeptBatch]
    losses: list[tuple[float, float]]
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    inexact: str = ""

    def write(self, folder: Path, rank: int) -> None:
        """Write the rank's files. Raises UsageError: a batch is of a kind that no file holds."""
        tensors: dict[str, torch.Tensor] = {}
        document = {
            "batches": [encode(vars(each), tensors, f"batch.{i}") for i, each in enumerate(self.batches)],
            "losses": encode([list(one) for one in self.losses], tensors, "losses"),
            "buffers": encode(self.buffers, tensors, "buffer"),
            "inexact": self.inexact,
        }
        # safetensors refuses tensors that share memory.
        plain = {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(plain, folder / f"rank-{rank}.safetensors")
        (folder / f"rank-{rank}.json").write_text(json.dumps(document), "utf-8")

    @classmethod
    def read(cls, folder: Path, rank: int) -> RankCapsule:
        """Read one rank's files. Raises ConfigError: they are not there, or not whole."""
        from lockstep.checkpoint.format.documents import validated

        name = f"rank-{rank}"
        try:
            check_plain_file(str(folder / f"{name}.safetensors"))
            tensors = load_file(folder / f"{name}.safetensors")
            return validated(cls, decode(_document(folder / f"{name}.json"), tensors), f"{name}.json")
        except (SafetensorError, *UNREADABLE) as error:
            raise ConfigError(
                f"{folder} has no complete files of rank {rank}: {str(error).rstrip('.')}. Replay another "
                "capsule."
            ) from error
