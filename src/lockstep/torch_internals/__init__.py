"""The only package that touches private names of torch: one file an engine.

Each function says which behaviour of torch is relied on. Each file has a ``probe``, which shows by presence, kind and
a tiny computation that the installed torch behaves so; it runs once, at the first use of the engine. A torch of
unknown shape is refused in one sentence, and never trained on.
"""
