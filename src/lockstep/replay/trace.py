"""What one micro-batch did, module by module: plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class Health(IntEnum):
    """Of the tensors that a module gets or gives.

    - ``FINE``: finite, or a mask: nothing but zeros and -inf.
    - ``LOW``: -inf among other numbers, as masked scores before a softmax have them, and the logarithm of zero.
    - ``BAD``: NaN, or +inf.
    """

    FINE = 0
    LOW = 1
    BAD = 2


@dataclass
class ModuleCall:
    """One call of a module's forward.

    Attributes:
        name: In its model; "" is the model itself.
        kind: The module's class.
        parent: Number of the call inside of which this one is; None: the script's.
        begin, end: The numbers of nodes in the graph that were made inside: from, and up to.
        inputs_rms, rms: Root mean square of what it gets, and returns; None: that is not finite, or no numbers.
        health_text: How many elements of its output are not finite, in words.
    """

    name: str
    kind: str
    parent: int | None
    begin: int
    end: int = 0
    inputs: Health = Health.FINE
    outputs: Health = Health.FINE
    inputs_rms: float | None = None
    rms: float | None = None
    health_text: str = ""


@dataclass(frozen=True)
class GradientFault:
    """The first operation of a backward whose results are not finite though what it got is.

    Attributes:
        node: The number of its node.
        operation: Such as SqrtBackward0.
        line: Of the script, or of the model's code, that called it; "": not known.
    """

    node: int
    operation: str
    line: str


@dataclass(frozen=True)
class GradientSize:
    """The root mean square of the gradient of a tensor that a call gets (``is_input``) or gives.

    ``tensor``: the same for all that tell of one tensor.
    """

    call: int
    is_input: bool
    tensor: int
    rms: float


@dataclass
class MicroBatchTrace:
    """One micro-batch of one rank.

    Attributes:
        calls: In the order in which they began.
        order: (number of the call, whether it has ended) in the order of time.
        gradients: In the order of backward.
        batch: What in the batch is not finite, in words; "": nothing.
        loss_line: The line that computed the loss.
    """

    rank: int = 0
    number: int = 0
    calls: list[ModuleCall] = field(default_factory=list)
    order: list[tuple[int, bool]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    fault: GradientFault | None = None
    gradients: list[GradientSize] = field(default_factory=list)
    batch: str = ""
    loss_line: str = ""

    def key(self, number: int) -> tuple[str, int]:
        """Return what is the same for the same call of every micro-batch: the module's name, and which of its
        calls.
        """
        name = self.calls[number].name
        return name, sum(call.name == name for call in self.calls[:number])
