"""What the user's hooks see of a save, and what they leave of it. No collective."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from lockstep.checkpoint.contents import CheckpointContents, SaveHook
from lockstep.checkpoint.state import RankState
from lockstep.checkpoint.writer import Writer
from lockstep.errors import UsageError


def run_hooks(
    hooks: Iterable[SaveHook],
    contents: CheckpointContents,
    weights: list[dict[str, object]],
    state: RankState,
    staging: str,
) -> None:
    """Hooks see whole weights, and what they leave of them is what is saved."""
    left = list(weights)
    with _as_whole_models(contents, weights):
        for hook in list(hooks):
            hook(list(contents.models), left, staging)
    for number, of_model in enumerate(weights):
        state.replace_model(number, of_model if any(of_model is kept for kept in left) else None)


@contextmanager
def _as_whole_models(contents: CheckpointContents, weights: list[dict[str, object]]) -> Iterator[None]:
    """Inside, ``state_dict`` of a model gives the weights that were gathered: one rank may save them alone."""
    with ExitStack() as handles:
        for model, gathered in zip(contents.models, weights, strict=True):
            handles.callback(model.register_state_dict_post_hook(partial(_show, dict(gathered))).remove)
        yield


def _show(gathered: dict[str, object], _: object, state: dict[str, object], prefix: str, *__: object) -> None:
    state.update({prefix + name: tensor for name, tensor in gathered.items() if prefix + name in state})


def refuse_url(writer: Writer) -> None:
    if not writer.store.is_local:
        raise UsageError(
            f"A hook that runs before save_state would write files into {writer.directory}, but that is a URL. "
            "Save to a local directory, or remove the hook."
        )
