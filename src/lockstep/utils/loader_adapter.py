"""Around a plain ``DataLoader``: its batches, counted and numbered, under the names of Accelerate's adapters."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from lockstep.accelerator import Accelerator
from lockstep.comm.tree import StateDict
from lockstep.errors import MissingExtraError, UsageError
from lockstep.runtime.step import StepState


def get_sampler(dataloader: Any) -> Any:
    """Return the sampler that draws the indices of a loader's samples.

    Args:
        dataloader: A ``DataLoader``, also a prepared one, over a map-style dataset.

    Examples:
        ```python
        import torch
        from lockstep.data_loader import get_sampler

        loader = torch.utils.data.DataLoader(range(4), batch_size=2, shuffle=True)
        assert isinstance(get_sampler(loader), torch.utils.data.RandomSampler)
        ```
    """
    sampler: object = dataloader.batch_sampler
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    found = getattr(sampler, "sampler", None)
    return dataloader.sampler if found is None else found


class DataLoaderStateMixin:
    """A mixin for classes of loaders. Through it ``gradient_state`` knows which loader runs and whether it is at its
    end.

    Call ``begin()`` and ``end()`` around an iteration, and set ``end_of_dataloader`` before the last batch is
    yielded. Then an accumulation window ends with the loader, as with prepared loaders.

    Attributes:
        end_of_dataloader: Whether the last batch was yielded.
        remainder: The number of samples in the last global batch, if it is not complete. 0: it is. -1: it is not
            known.
        gradient_state: The state of the latest ``Accelerator``, from ``GradientState()``.

    Examples:
        ```python
        from lockstep import Accelerator
        from lockstep.data_loader import DataLoaderStateMixin
        from lockstep.state import GradientState

        class Batches(DataLoaderStateMixin):
            def __init__(self):
                self.gradient_state = GradientState()

            def __iter__(self):
                self.begin()
                for number in range(3):
                    self.end_of_dataloader = number == 2
                    yield number
                self.end()
                self.reset()

        accelerator = Accelerator(gradient_accumulation_steps=2)
        assert list(Batches()) == [0, 1, 2]
        ```
    """

    end_of_dataloader = False
    remainder = -1
    gradient_state: StepState

    def reset(self) -> None:
        """Set ``end_of_dataloader`` and ``remainder`` to their values from before an iteration."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Note that an iteration begins."""
        self.reset()
        total = getattr(self, "total_batch_size", None)
        dataset = getattr(self, "dataset", None)
        if total and not getattr(self, "_drop_last", False) and hasattr(dataset, "__len__"):
            self.remainder = getattr(dataset, "total_dataset_length", len(dataset)) % total  # type: ignore[arg-type]
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """Note that the iteration has ended."""
        self.gradient_state._remove_dataloader(self)


class DataLoaderAdapter:
    """A loader with a ``DataLoader`` inside, ``base_dataloader``.

    Its other attributes are those of ``base_dataloader``, and ``isinstance`` takes it for one. It does not share
    samples out to ranks: ``accelerator.prepare`` does.

    Args:
        dataset: The dataset.
        use_stateful_dataloader: Let torchdata's ``StatefulDataLoader`` read the data. It has a ``state_dict``.
        batch_sampler: The sampler of batches.
        kwargs: Further arguments of ``torch.utils.data.DataLoader``.

    Raises:
        ImportError: ``use_stateful_dataloader`` is True, and torchdata is not installed.

    Examples:
        ```python
        from lockstep.data_loader import DataLoaderAdapter

        loader = DataLoaderAdapter(range(4), batch_size=2)
        assert loader.batch_size == 2  # of the loader inside
        assert len(loader.base_dataloader) == 2
        ```
    """

    def __init__(
        self,
        dataset: object,
        use_stateful_dataloader: bool = False,
        batch_sampler: object = None,
        **kwargs: object,
    ) -> None:
        self.use_stateful_dataloader = use_stateful_dataloader
        kind: Any = DataLoader
        if use_stateful_dataloader:
            try:
                from torchdata.stateful_dataloader import StatefulDataLoader
            except ImportError as error:
                raise MissingExtraError("use_stateful_dataloader", "torchdata", "torchdata") from error
            kind = StatefulDataLoader
        self.base_dataloader = kind(dataset, batch_sampler=batch_sampler, **kwargs)
        if hasattr(self.base_dataloader, "state_dict"):
            self.dl_state_dict: dict[str, object] = self.base_dataloader.state_dict()

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.base_dataloader)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        kept = {name: value for name, value in vars(self).items() if name != "gradient_state"}
        return _restored, (type(self), kept)

    def state_dict(self) -> StateDict:
        """Return the position after the last batch that was yielded, in torchdata's form.

        Raises:
            UsageError: the loader was made without ``use_stateful_dataloader``.

        Examples:
            ```python
            from lockstep.data_loader import DataLoaderAdapter

            loader = DataLoaderAdapter(range(4), use_stateful_dataloader=True, batch_size=2)
            assert loader.state_dict()
            ```
        """
        if not hasattr(self, "dl_state_dict"):
            raise UsageError(
                "This loader has no position to save, because it is a torch DataLoader. Make it with "
                "use_stateful_dataloader=True, or pass a DataLoader to accelerator.prepare()."
            )
        return self.dl_state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue at the position in ``state_dict``, in the next iteration.

        Examples:
            ```python
            from lockstep.data_loader import DataLoaderAdapter

            loader = DataLoaderAdapter(range(4), use_stateful_dataloader=True, batch_size=2)
            loader.load_state_dict(loader.state_dict())
            ```
        """
        self.state_dict()
        self.base_dataloader.load_state_dict(state_dict)
        self.dl_state_dict = self.base_dataloader.state_dict()

    def adjust_state_dict_for_prefetch(self) -> None:
        """Do nothing. A class that reads ahead changes ``dl_state_dict`` here, so that it counts the batches that
        were yielded.

        Examples:
            ```python
            from lockstep.data_loader import DataLoaderAdapter

            loader = DataLoaderAdapter(range(4), use_stateful_dataloader=True, batch_size=2)
            loader.adjust_state_dict_for_prefetch()  # for classes that read ahead
            ```
        """

    def _update_state_dict(self) -> None:
        """Note the position. The iteration is one batch ahead when the next one was read already."""
        if hasattr(self.base_dataloader, "state_dict"):
            self.dl_state_dict = self.base_dataloader.state_dict()
            self.adjust_state_dict_for_prefetch()
            self.dl_state_dict["_iterator_finished"] = getattr(self, "end_of_dataloader", False)


def _restored(kind: type, state: dict[str, object]) -> object:
    loader: Any = object.__new__(kind)
    loader.__dict__.update(state)
    if issubclass(kind, DataLoaderStateMixin):
        loader.gradient_state = state_of_latest()
    return loader


def state_of_latest() -> StepState:
    latest = Accelerator.latest()
    return StepState() if latest is None else latest.gradient_state
