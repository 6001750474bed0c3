"""Collectives of the ranks of one host through memory that they share, as a backend of ``torch.distributed``.

backend       how torch gets to know it
join          making a group; gloo where memory cannot be shared
group         torch's methods
pending       calls in their order, and torch's handles for them
tensors       contiguous memory for the tensors of a call
algorithms    the collectives, as rows of steps
buffers       memory for tensors that are made to be gathered or reduced
hosts         the same for ranks on several hosts: gloo between their first ranks
channel       messages between two ranks
slots         two slots for each rank, counters, waiting, ranks that have ended
layout        where things lie in the shared memory
segment       anonymous memory that several processes map
futex         sleep and wake on a word of shared memory
call_code     a call as a number that ranks compare
history       what was called, for who looks into a hang
"""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules
from lockstep.shared_memory.backend import register as register

if not TYPE_CHECKING:
    __getattr__ = names_of_modules(
        __name__,
        {
            "buffers": ["ADDRESS_BYTES", "GatheredBuffers"],
            "join": ["share"],
            "layout": ["GroupLayout", "SLOT_BYTES"],
            "segment": ["Segment"],
            "slots": ["Peers", "RankSlots"],
        },
    )
