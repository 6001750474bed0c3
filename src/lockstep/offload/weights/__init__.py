"""Weights that are brought to the device before they are used, and let go after it."""

from typing import TYPE_CHECKING

from lockstep.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.offload.weights.attach import stop_streaming as stop_streaming
    from lockstep.offload.weights.attach import stream_weights as stream_weights
    from lockstep.offload.weights.attach import streamer_of as streamer_of
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "stop_streaming": "lockstep.offload.weights.attach",
            "stream_weights": "lockstep.offload.weights.attach",
            "streamer_of": "lockstep.offload.weights.attach",
        },
    )
