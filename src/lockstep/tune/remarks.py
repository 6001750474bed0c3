"""Whether another micro-batch computes the same: what the trials show of it, in sentences."""

from __future__ import annotations

from lockstep.config.values import join_names
from lockstep.tune.tuner import CouldNotTune, TuneResult

SAME = 1e-3
"""Relative difference of the first step's loss up to which it counts as the same: rounding, also in half precision
of few steps, stays below; a loss that is not a mean does not."""
SHOWN = 3


def refuse_sums(result: TuneResult) -> None:
    """Raise CouldNotTune where the loss grows with the rows of a micro-batch, as sums do."""
    for size, ratio, expected in _ratios(result):
        # The loss of a sum grows as the rows do; sizes within a tenth of each other could not tell.
        if abs(expected - 1) > 0.1 and abs(ratio / expected - 1) < 0.02:
            raise CouldNotTune(
                f"The loss is a sum over the rows of a micro-batch: with {size} rows the first step has "
                f"{ratio:.4g} times the loss, although it trains on the same rows. So another size would have "
                "the effect of another learning rate. Divide the loss by the rows of the micro-batch, or pass "
                "backward(loss, weight=...)."
            )


def remarks_on(result: TuneResult) -> list[str]:
    """Sentences on what changes with the micro-batch, or that nothing does."""
    remarks: list[str] = []
    facts, rows = result.script, result.global_batch
    ratios = _ratios(result)
    if facts.norms:
        names = join_names((f"`{name}`" for name in facts.norms), SHOWN)
        remarks.append(
            f"{names} take the statistics of one micro-batch: with another size the model trains "
            "differently, although the global batch is the same. Keep the script's own size to keep its "
            "numbers, or use GroupNorm or LayerNorm."
        )
    furthest = max((abs(ratio - 1) for _, ratio, _ in ratios), default=0.0)
    if furthest > SAME:
        remarks.append(
            f"The loss of the first step, on the same rows, differs by up to {furthest:.2%} between the sizes. "
            "Dropout causes this, and so do statistics of a micro-batch, and a mean over tokens if rows have "
            "different numbers of tokens. For such a mean, call backward(loss, weight=number_of_tokens)."
        )
    elif ratios:
        remarks.append(
            f"The loss of the first step, on the same rows, is the same for all sizes (to {furthest:.1g} of it)."
        )
    if facts.samples is not None and facts.samples % rows:
        left = facts.samples % rows
        if facts.drop_last:
            remarks.append(
                f"An epoch of {facts.samples} samples is {facts.samples // rows} steps of {rows} and {left} "
                "more. With drop_last=True the micro-batch determines how many of these are left out."
            )
        elif not facts.weighted:
            remarks.append(
                f"The last step of an epoch has {left} of {rows} rows, and losses have no weights, so how much "
                "these micro-batches count depends on their size. For an exact mean over the rows, pass "
                "unreduced losses and backward(loss, weight=accelerator.sample_weights())."
            )
    best = result.quickest or result.largest
    if not facts.uses_accumulate and best is not None and best.accumulation > 1:
        remarks.append(
            "The script does not mark its micro-batches. Put the body of the training loop into `with "
            "accelerator.accumulate(model):`."
        )
    return remarks


def _ratios(result: TuneResult) -> list[tuple[int, float, float]]:
    """Size, its first loss over that of the smallest one, and what that would be for a sum."""
    known = [(one.micro_batch, one.first_loss) for one in result.trials if one.first_loss is not None]
    if len(known) < 2 or abs(known[0][1]) < 1e-12:
        return []
    size_0, loss_0 = known[0]
    return [(size, loss / loss_0, size / size_0) for size, loss in known[1:]]
