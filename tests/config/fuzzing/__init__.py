"""Configurations and command lines, each with what the documentation says of it.

- ``pools``: raw texts for each setting, and what each means; ``WRONG`` ones must be refused.
- ``each``: each of these texts by itself, and hostile files: none is left to chance.
- ``files``: random YAML, DeepSpeed JSON and hostfiles made from them, and damaged bytes.
- ``lines``, ``commands``: words of ``parallel`` lines, and flags.
- ``judge``: what must hold of whatever is accepted, written from the documentation alone.
- ``readers``: what reads each kind.
- ``trial``: one input, run and judged.

What makes a random input draws from a ``random.Random``. That of hypothesis makes a failing input smaller; that of
``benchmarks/fuzz.py`` has a seed.
"""
