"""Which fragment is refused under which strategy, with a piece of what is said; all others are right."""

from __future__ import annotations

UNDER_CP: dict[str, tuple[str, ...]] = {
    "with parallel=": (
        *("attention: encoder layer, time first",),
        *(
            "mlp: batch norm of features",
            "state: batch norm of tokens",
        ),
        *(
            "alike: a function mixes positions",
            "alike: an object chooses positions",
            "alike: positions in training",
            "alike: zero times positions",
            "alike: experts by where, their routers' losses",
        ),
        *(
            "attention: rope inside",
            "attention: linear attention",
            "attention: persistent keys",
            "attention: windows by reshaping",
        ),
        *(
            "mlp: squeeze and excite",
            "mlp: branch on the batch's values",
            "mlp: experts that choose rows",
            "mlp: fourier",
            "mlp: number from a tensor",
            "mlp: normalised gradient",
            "mlp: gradient over its norm",
            "mlp: convolution of three",
            "mlp: token mixing",
            "mlp: gru",
        ),
        *(
            "state: running mean",
            "state: mean of the last batch",
            "state: norm hook on an inner layer",
            "state: features by hooks",
            "state: inner features by hooks",
        ),
        *(
            "structure: an auxiliary loss through blocks",
            "structure: auxiliary losses beside blocks",
            "structure: mixture with capacity",
        ),
    ),
    "has a forward as an attribute, which hides": ("structure: a block's forward around the one before",),
    "without a gradient": (
        "loss: in-batch negatives",
        "loss: rows of the head",
        "loss: no labels",
        "structure: first block without gradients",
        "structure: detached in the middle",
        "structure: one block left out",
    ),
    "need_weights=False": ("attention: multihead with weights",),
    "the same batch size and number of heads": ("attention: cross attention to one memory",),
    "would see the whole sequence": ("attention: no attention", "attention: by hand"),
    "The attention mask is": ("attention: multihead, time first",),
    "Name the modules that take these": ("loss: adaptive softmax",),
    "between its blocks": (
        "structure: dense",
        "structure: deep supervision",
        "structure: scaled by depth",
    ),
    "run one after the other": ("structure: half as long",),
    "Call the blocks in their order": ("structure: blocks in reverse",),
    "were found. Name them": ("structure: attributes",),
}
"""By both methods of context parallel."""

REFUSED: dict[str, dict[str, tuple[str, ...]]] = {
    "tp": {
        "the layer that computes its input is not split to match": ("mlp: lora",),
        "takes 16 of 32 features": ("mlp: functional call",),
        "differentiates twice": ("mlp: gradient inside",),
        "cannot be divided among tp=2 ranks": ("attention: multi-query",),
        "weights from parameters()": ("loss: l2 of all parameters",),
        "or a hook takes them out": ("state: inner features by hooks",),
        "max_norm does so too": ("structure: largest norm",),
        "inside torch.func": ("mlp: in vmap",),
        "that a model had before accelerator.prepare()": (
            "structure: a parameter in a closure",
            "structure: a parameter in a list",
        ),
    },
    "ring": {
        **UNDER_CP,
        "cp_method=ulysses": (
            "attention: a mask of the batch",
            "attention: relative positions",
            "attention: multihead",
        ),
        "do not divide": ("structure: class token of odd length",),
        "runs on the first batch, but with parallel=": ("structure: scalar mix",),
    },
    "ulysses": {
        **UNDER_CP,
        "Make the mask of the whole sequence": (
            "attention: relative positions",
            "attention: multihead",
        ),
        "do not divide": ("attention: head after head", "structure: class token of odd length"),
        "cp_method=ulysses": ("structure: scalar mix",),
    },
    "pp": {
        "micro-batches of a pipeline": ("alike: nodes of one graph",),
        "they divide by different numbers": ("loss: adaptive softmax",),
        "changes the buffer": (
            "state: running mean",
            "state: mean of the last batch",
            "state: queue of keys",
        ),
        "is a batch normalisation": (
            "mlp: batch norm of features",
            "state: batch norm of tokens",
        ),
        "does not compute what the whole model does": (
            "mlp: experts that choose rows",
            "mlp: number from a tensor",
            "mlp: branch on the batch's values",
            "state: counter in an object",
            "state: random numbers of its own",
            "structure: all rows in one",
            "structure: mixture with capacity",
            "alike: a function mixes rows",
            "alike: an object chooses rows",
            "alike: rows in training",
            "alike: zero times rows",
            "alike: as many rows as four",
            "mlp: normalised gradient",
            "mlp: gradient over its norm",
            "loss: l2 of all parameters",
            "state: tokens seen",
            "state: norm hook on an inner layer",
            "structure: reentrant checkpoints",
        ),
        "without reading it from a module": (
            "structure: a parameter in a closure",
            "structure: a parameter in a list",
        ),
        "needs a value of a tensor that only another stage": ("loss: l1 of norms",),
        "changes the parameter": ("loss: a moving teacher",),
        "runs on the first batch, but with parallel=": ("structure: attributes of the first weight",),
        "needs the value of a tensor that only another stage": (
            "loss: a dictionary with numbers",
            "structure: early exit",
        ),
        "an earlier stage of the pipeline": (
            "state: features by hooks",
            "state: inner features by hooks",
            "structure: one MLP for all",
        ),
        "A pipeline needs every block": (
            "structure: blocks in reverse",
            "structure: one block left out",
            "structure: two batches, one after the other",
        ),
        "each of which needs at least one": ("structure: one block for all", "structure: attributes"),
        "was not called yet": ("structure: mixture with both losses",),
    },
    "ep": {
        "weights from parameters()": ("loss: l2 of all parameters",),
    },
}
