"""The states of the features, of ``docs/data/features.yaml``: none may get worse."""

from __future__ import annotations

from collections.abc import Mapping

from tests.site import features


def now() -> dict[str, str]:
    return {row["feature"]: row["state"] for group in features.load()["groups"] for row in group["rows"]}


def worse(frozen: Mapping[str, str], states: Mapping[str, str]) -> dict[str, str]:
    """Return the features that are gone, or whose state is another one and neither "works" nor a first "works; ..."."""
    return {
        feature: f"{state}; now {states.get(feature, 'gone')}"
        for feature, state in frozen.items()
        if (there := states.get(feature, "")) not in (state, "works")
        and not (there.startswith("works") and not state.startswith("works"))
    }
