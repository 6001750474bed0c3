"""Checkpoints that other libraries pickled, read without unpickling them in this process."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "convert": ["read_foreign"],
            "isolated": ["RefusedError", "unpickle"],
            "restricted.machine": ["Machine"],
            "restricted.main": ["Encoder"],
            "restricted.nodes": ["RefusedFile"],
            "result": ["write_imported"],
            "state": ["describe_state", "ImportedState"],
            "tensors": ["decode", "MalformedError", "MappedFile", "Scratch"],
            "zero": ["join_stage_1_and_2", "join_stage_3", "spans_of_stage_1_and_2", "spans_of_stage_3"],
        },
    )
