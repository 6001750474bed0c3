"""Weights that are brought to the device before they are used, and let go after it."""

from typing import TYPE_CHECKING

from lockstep.lazy import names_of_modules

if TYPE_CHECKING:
    from lockstep.offload.weights.attach import stop_streaming as stop_streaming
    from lockstep.offload.weights.attach import stream_weights as stream_weights
    from lockstep.offload.weights.attach import streamer_of as streamer_of
else:
    __getattr__ = names_of_modules(
        __name__,
        {
            "attach": ["listen", "stop_streaming", "stream_weights", "streamer_of"],
            "device.mover": ["DeviceMover"],
            "device.working": ["Slots"],
            "groups": ["enclosing_groups", "find_weight_groups", "WeightGroup"],
            "mover": ["least_budget", "MappedMover"],
            "schedule": ["choose_ahead", "choose_urgent", "Successors"],
            "streamer": ["Streamer"],
        },
    )
