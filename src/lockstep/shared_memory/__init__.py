"""Collectives of the ranks of one host through memory that they share, as a backend of ``torch.distributed``.

backend       how torch gets to know it
join          making a group; gloo where memory cannot be shared, as by ranks of several hosts
group         torch's methods
pending       calls in their order, and torch's handles for them
tensors       contiguous memory for the tensors of a call
algorithms    the collectives, as rows of steps
buffers       memory for tensors that are made to be gathered or reduced
channel       messages between two ranks
slots         two slots for each rank, counters, waiting, ranks that have ended
segment       anonymous memory that several processes map, and where things lie in it
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
            "segment": ["GroupLayout", "Segment", "SLOT_BYTES"],
            "slots": ["Peers", "RankSlots"],
        },
    )
