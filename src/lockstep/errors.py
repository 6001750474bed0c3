"""The exceptions of Lockstep, as a small tree.

    LockstepError
    ├── ConfigError (ValueError)
    ├── UsageError (RuntimeError)
    │   ├── ArgumentError (ValueError)
    │   └── StateResetError (AttributeError)
    ├── CollectiveMismatchError (RuntimeError)
    ├── CheckpointError (RuntimeError)
    │   └── NoCheckpointError (ValueError)
    ├── DamageError (RuntimeError)
    ├── OffloadError (RuntimeError)
    ├── ControlError (RuntimeError)
    └── MissingExtraError (ImportError)

Every message is one sentence on what is wrong, with the numbers, and one on what to do.
"""

from __future__ import annotations


class LockstepError(Exception):
    """The base class of every exception that Lockstep raises on purpose.

    If another rank's failure is the cause, the attribute ``caused_by_rank`` is that rank. Otherwise it is None.

    Examples:
        ```python
        from lockstep import Accelerator
        from lockstep.errors import LockstepError

        try:
            Accelerator(mixed_precision="bf61")
            raise AssertionError("it was accepted")
        except LockstepError as error:  # any that Lockstep raises on purpose
            print(error)
        ```
    """

    caused_by_rank: int | None = None


class ConfigError(LockstepError, ValueError):
    """A setting is unknown, malformed, out of range or contradicts another one.

    Examples:
        ```python
        from lockstep import Accelerator
        from lockstep.errors import ConfigError

        try:
            Accelerator(parallel="zero=4")
            raise AssertionError("it was accepted")
        except ConfigError as error:
            assert "zero" in str(error)  # names what is wrong, and what is allowed
        ```
    """


class UsageError(LockstepError, RuntimeError):
    """A call came too early, too late, or with an object that was not prepared.

    Examples:
        ```python
        from lockstep import Accelerator
        from lockstep.errors import UsageError
        from lockstep.nn import load_balance_loss
        import torch

        try:
            load_balance_loss(torch.nn.Linear(4, 1))
            raise AssertionError("a model without experts has such a loss")
        except UsageError as error:
            print(error)
        ```
    """


class ArgumentError(UsageError, ValueError):
    """A ``UsageError`` of one argument, which scripts written for Accelerate catch as ``ValueError``.

    Examples:
        ```python
        from lockstep.errors import ArgumentError, UsageError

        assert issubclass(ArgumentError, UsageError)
        assert issubclass(ArgumentError, ValueError)  # as scripts for Accelerate catch it
        ```
    """


class StateResetError(UsageError, AttributeError):
    """An object is used after the state of its ``Accelerator`` was reset. Accelerate's scripts catch it as
    ``AttributeError``.

    Examples:
        ```python
        from lockstep import Accelerator
        from lockstep.errors import StateResetError
        from lockstep.state import AcceleratorState
        import torch

        accelerator = Accelerator()
        AcceleratorState._reset_state()
        try:
            accelerator.prepare(torch.nn.Linear(4, 1))
            raise AssertionError("it was prepared")
        except StateResetError as error:
            print(error)
        ```
    """


class CollectiveMismatchError(LockstepError, RuntimeError):
    """Ranks entered one collective with different operations, structures, shapes or dtypes.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator, debug_launcher
        from lockstep.errors import CollectiveMismatchError

        def check() -> None:
            accelerator = Accelerator()
            try:
                accelerator.reduce(torch.ones(2 + accelerator.process_index))  # other shapes
                raise AssertionError("it was reduced")
            except CollectiveMismatchError as error:
                accelerator.print(error)  # names both shapes

        debug_launcher(check, num_processes=2)
        ```
    """


class DifferentCallsError(CollectiveMismatchError):
    """The same, where the ranks are in different calls of the script; the message names the line of each.

    Examples:
        ```python
        from lockstep.errors import CollectiveMismatchError, DifferentCallsError

        assert issubclass(DifferentCallsError, CollectiveMismatchError)
        ```
    """


class CheckpointError(LockstepError, RuntimeError):
    """A checkpoint is missing, incomplete or does not fit what it is loaded into.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator, CheckpointError

        accelerator = Accelerator()
        model = accelerator.prepare(torch.nn.Linear(4, 1))
        folder = accelerator.save_state("of_a_small_model")
        accelerator.free_memory()
        larger = accelerator.prepare(torch.nn.Linear(8, 1))
        try:
            accelerator.load_state(folder)
        except CheckpointError as error:
            accelerator.print(error)  # names the weight and both shapes
        else:
            raise AssertionError("it was loaded")
        ```
    """


class NoCheckpointError(CheckpointError, ValueError):
    """There is no checkpoint where one was looked for. Scripts written for Accelerate catch it as ``ValueError``.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator, NoCheckpointError

        accelerator = Accelerator()
        model = accelerator.prepare(torch.nn.Linear(4, 1))
        try:
            accelerator.load_state("a_folder_that_is_not_there")
            raise AssertionError("it was found")
        except NoCheckpointError:
            accelerator.print("starting from scratch")
        ```
    """


class DamageError(LockstepError, RuntimeError):
    """Parameters differ among ranks that must hold the same, or gradients are no finite numbers.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator, DamageChecks, DamageError

        accelerator = Accelerator(kwargs_handlers=[DamageChecks(bad_gradients="stop")])
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.full((8, 4), float("nan"))).sum())
        try:
            optimizer.step()
            raise AssertionError("the step was made")
        except DamageError as error:
            accelerator.print(error)  # names the parameter
        ```
    """


class SpikeError(LockstepError, RuntimeError):
    """The loss or the gradient norm of a step is far above that of the steps before it, or not finite.

    Examples:
        ```python
        import torch
        from lockstep import Accelerator, SpikeError, SpikePolicy

        accelerator = Accelerator(kwargs_handlers=[SpikePolicy(action="stop")])
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        try:
            accelerator.backward(model(torch.full((8, 4), float("inf"))).square().mean())
            optimizer.step()
            raise AssertionError("the step was made")
        except SpikeError as error:
            accelerator.print(error)
        ```
    """


class OffloadError(LockstepError, RuntimeError):
    """Weights, gradients or optimizer state do not fit where they were to be kept, or cannot be read from there.

    Examples:
        ```python
        import torch
        from lockstep import OffloadError
        from lockstep.utils import offload_state_dict

        offload_state_dict("kept", {"weight": torch.zeros(2)})
        try:
            offload_state_dict("kept", {"weight": torch.ones(2)})  # of another model
            raise AssertionError("it was written over")
        except OffloadError as error:
            print(error)
        ```
    """


class ControlError(LockstepError, RuntimeError):
    """A launcher or worker of the run cannot be reached, is gone, or did not prove that it belongs to the run.

    Examples:
        ```python
        from lockstep.errors import ControlError, LockstepError

        # In a worker whose launcher is gone, on a machine that was lost, say:
        assert issubclass(ControlError, (LockstepError, RuntimeError))
        ```
    """


class MissingExtraError(LockstepError, ImportError):
    """An optional package that a feature needs is not installed. The message has the command that installs it.

    Args:
        feature: The feature, as the beginning of the message.
        package: The package.
        extra: The extra of this package that installs it.

    Examples:
        ```python
        from lockstep.errors import MissingExtraError

        error = MissingExtraError("The tracker 'aim'", package="aim", extra="aim")
        assert isinstance(error, ImportError)
        assert "pip install" in str(error)  # what to do
        ```
    """

    def __init__(self, feature: str, package: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the package '{package}', which is not installed. Install it with: pip install {package} "
            f"(in a folder of the source of Lockstep: pip install '.[{extra}]')"
        )
