"""Checkpoints that other libraries pickled, read without unpickling them in this process."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "container": ["FileSlice", "find_pickles"],
            "convert": ["read_foreign"],
            "isolated": ["RefusedError", "unpickle"],
            "restricted.machine": ["Machine", "RefusedFile"],
            "restricted.main": ["Encoder"],
            "result": ["write_imported"],
            "state": ["describe_state", "ImportedState"],
            "tensors": ["MalformedError", "MappedFile", "UnreadableError", "Scratch", "Storage"],
            "values": ["decode"],
            "zero": ["join_stage_1_and_2", "join_stage_3", "spans_of_stage_1_and_2", "spans_of_stage_3"],
        },
    )
