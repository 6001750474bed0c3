"""How long a language model of a given size would take at the rate of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.plan.sizes import parse_count
from lockstep.report.numbers import RunNumbers
from lockstep.words import digits, duration, short

FLOPS = 6
"""Of each parameter for each token, in forward and backward (Kaplan et al. 2020). Attention's own is not in it."""
TOKENS_PER_PARAMETER = 20
"""Where nobody says how many tokens (Hoffmann et al. 2022)."""


@dataclass(frozen=True)
class LanguageModel:
    """So many parameters, trained on so many tokens."""

    parameters: int
    tokens: int

    @property
    def flops(self) -> float:
        """Of its whole training."""
        return float(FLOPS * self.parameters * self.tokens)

    def seconds(self, numbers: RunNumbers) -> float:
        """Of its training at the rate of this run; NaN: the run's is not known."""
        rate = numbers.model_flops_per_second
        return self.flops / rate if rate > 0 else math.nan

    def sentence(self, numbers: RunNumbers) -> str:
        what = f"A language model of {short(self.parameters)} parameters on {short(self.tokens)} tokens"
        needs = f"takes {digits(self.flops)} FLOPs ({FLOPS} N D)"
        if math.isnan(seconds := self.seconds(numbers)):
            return f"{what} {needs}; how many this run does in a second is not known."
        rate = short(numbers.model_flops_per_second)
        return f"{what} {needs}: at this run's {rate} in a second, {duration(seconds)} on the same devices."


def parse_language_model(text: str, origin: str) -> LanguageModel:
    """``7B:140B``, parameters and tokens; ``7B``: on 20 tokens for each parameter.

    Raises:
        ConfigError: it is neither; the message begins with ``origin``.
    """
    first, colon, second = text.partition(":")
    parameters = parse_count(first, origin)
    return LanguageModel(
        parameters, parse_count(second, origin) if colon else TOKENS_PER_PARAMETER * parameters
    )
