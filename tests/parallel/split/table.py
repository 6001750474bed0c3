"""All fragments, by name."""

from __future__ import annotations

from tests.parallel.split.alike import ALIKE
from tests.parallel.split.attention import ATTENTION
from tests.parallel.split.host import Fragment
from tests.parallel.split.layers import LAYERS
from tests.parallel.split.losses import LOSSES
from tests.parallel.split.state import STATE
from tests.parallel.split.structure import STRUCTURE

FRAGMENTS: dict[str, Fragment] = {
    **{f"mlp: {name}": fragment for name, fragment in LAYERS.items()},
    **{f"attention: {name}": fragment for name, fragment in ATTENTION.items()},
    **{f"loss: {name}": fragment for name, fragment in LOSSES.items()},
    **{f"state: {name}": fragment for name, fragment in STATE.items()},
    **{f"structure: {name}": fragment for name, fragment in STRUCTURE.items()},
    **{f"alike: {name}": fragment for name, fragment in ALIKE.items()},
}

FAST: dict[str, tuple[str, ...]] = {
    "tp": (
        *("mlp: swiglu in one", "mlp: lora", "mlp: ternary weights", "mlp: odd width", "attention: grouped"),
        *("attention: timm", "loss: rows of the head", "loss: l2 of all parameters", "structure: tied head"),
        *("state: inner features by hooks", "structure: class token", "structure: one MLP for all"),
        *("structure: a parameter in a closure", "structure: forwards around those before"),
    ),
    "ring": (
        *(
            "mlp: squeeze and excite",
            "mlp: gru",
            "attention: by hand",
            "attention: nanogpt",
            "mlp: orthogonal",
        ),
        *("state: buffer made late", "state: counter in a list", "structure: rows as many as the length"),
        *("structure: deep supervision", "alike: a function mixes positions", "alike: positions in training"),
    ),
    "ulysses": (
        *("attention: a mask of positions", "attention: grouped by argument", "mlp: layer scale"),
        *("structure: a vector of each row to blocks", "attention: multihead, time first"),
    ),
    "pp": (
        *("structure: a parameter in a list", "mlp: pruned", "loss: l1 of norms", "loss: a moving teacher"),
        *("state: counter in a list", "state: running mean of weights", "structure: class token"),
        *("structure: two lists", "structure: features as many as rows"),
        "alike: experts by where, their routers' losses",
    ),
    "ep": (
        *(
            "structure: mixture with both losses",
            "structure: mixture with capacity",
            "attention: encoder layer",
        ),
        *(
            "state: batch norm of tokens",
            "state: features by hooks",
            "loss: preferences",
        ),
        *("mlp: reversed gradient", "structure: one block for all"),
    ),
}
"""What is not left to the long run; all faults that were found are among them."""

WORDS: dict[str, dict[str, tuple[str, ...]]] = {
    "pp": {
        "loss=sum": ("loss: sum", "loss: sum by a constant"),
        "micro_batches=4": ("loss: preferences",),
        "batch_dims=c=none": (
            "structure: features as many as rows",
            "structure: classes as many as rows",
        ),
        "loss=whole": (
            "loss: mean of padded",
            "loss: sum by labels",
            "loss: weights of classes",
            "loss: weights of tokens",
            "loss: preferences",
            "loss: in-batch negatives",
            "loss: masked by lengths",
            "loss: log-sum-exp of rows",
            "loss: flooding",
            "loss: detached",
            "alike: zero times a sum",
            "state: running loss",
            "structure: classes as many as rows",
        ),
    }
}
"""What is said under a strategy, beside what a fragment itself says."""


def words_of(name: str, strategy: str) -> str:
    """What ``parallel`` says under a strategy for one fragment."""
    said = [words for words, names in WORDS.get(strategy, {}).items() if name in names]
    return " ".join([FRAGMENTS[name].options.get(strategy, ""), *said])
