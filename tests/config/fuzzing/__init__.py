"""Random configurations and command lines, each with what the documentation says of it.

- ``pools``: raw texts for each setting, and what each means; ``WRONG`` ones must be refused.
- ``files``: YAML, DeepSpeed JSON and hostfiles made from them, damaged bytes, hostile files.
- ``lines``, ``commands``: ``parallel`` lines, environments, command lines.
- ``judge``: what must hold of whatever is accepted, written from the documentation alone.
- ``readers``: what reads each kind.
- ``trial``: one input, run and judged.

What makes an input draws from a ``random.Random``. That of hypothesis makes a failing input smaller.
"""
