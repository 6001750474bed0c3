"""Context parallelism: each rank holds a part of every sequence; attention alone needs the others'.

``layout`` says who holds which positions; ``ring`` and ``ulysses`` are the two attentions; ``region`` splits
and gathers around the blocks; ``apply`` puts it into a model; ``split`` is for callers who split themselves.
"""
