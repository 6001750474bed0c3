"""What a script does inside of a step, and where that stands, as methods of ``Accelerator``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.comm.methods import gather_for_loss
from lockstep.comm.tree import LossFunction, Tree
from lockstep.config.handlers import AutocastKwargs, GradientAccumulationPlugin
from lockstep.errors import UsageError
from lockstep.observe.run_observer import RunObserver
from lockstep.parallel.autocast import autocast
from lockstep.parallel.parallel_model import call_of
from lockstep.preparation.parts import AcceleratorParts
from lockstep.runtime.clock import waiting_for_ranks
from lockstep.runtime.step import StepState
from lockstep.train import clipping
from lockstep.train.accumulation import trigger_sync

if TYPE_CHECKING:
    from lockstep.observe.spikes.watch import SpikeWatch
    from lockstep.observe.state_bytes import StateBytes


class TrainingMethods(AcceleratorParts):
    """Methods that need the prepared objects, and where the step is."""

    def backward(
        self, loss: torch.Tensor, *, weight: torch.Tensor | float | None = None, **kwargs: object
    ) -> None:
        """Compute the gradients of this micro-batch, and add them to those of the accumulation window.

        Without ``weight``, the gradient of the window is that of the mean of ``loss`` over its micro-batches and
        ranks, as in Accelerate. With ``weight``, it is the gradient of ``sum(weight * loss) / sum(weight)`` over all
        of them. If the weights are numbers of samples or tokens, this is the gradient of one big batch.

        Args:
            loss: The loss, 0-d. With ``weight``, it may also be unreduced losses of any shape.
            weight: For a 0-d loss, the number of samples or tokens over which it is the mean. For other losses, a
                weight for each element (see ``sample_weights``). Either all ranks pass a weight, or none.
            kwargs: Keyword arguments of ``torch.Tensor.backward``.

        Raises:
            UsageError: no prepared model was called before, or the weights do not fit the loss.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = accelerator.prepare(torch.nn.Linear(4, 1))
            loss = model(torch.randn(8, 4)).square().mean()
            accelerator.backward(loss)  # in place of loss.backward()
            ```
        """
        self._preparation.gradients.check_backward(loss)
        if not self._step.has_given_batches:
            self._preparation.loaders.warn_of_unused()
        self._preparation.verifications.before_backward(loss)
        self._step.clock.backward_begins()
        scaled = self._accumulation.scale(loss, weight, self._preparation.gradients)
        if self._scaler is not None:
            scaled = self._scaler.scale(scaled)
        for observer in RunObserver.registered:
            scale = 1.0 if self._scaler is None else self._scaler.scaler.get_scale()
            observer.backward_begins(loss, self._accumulation.loss_factor * scale)
        is_complete = False
        if self._preparation.spikes is not None:
            self._preparation.spikes.backward(loss, weight)
        self.measures.backward_begins(loss, weight, creates_graph=bool(kwargs.get("create_graph")))
        try:
            self._preparation.gradients.backward(scaled, **kwargs)
            is_complete = True
        finally:
            self.measures.backward_ends(is_complete)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Refuse the fused backward and step of LOMO's optimizers.

        Args:
            loss: The loss, 0-d.
            learning_rate: The learning rate of the step.

        Raises:
            UsageError: always.

        Examples:
            ```python
            from lockstep import Accelerator

            try:
                Accelerator(cpu=True).lomo_backward(loss=None, learning_rate=0.1)
            except Exception as error:
                print(str(error)[:13])  # lomo_backward
            ```
        """
        raise UsageError(
            "lomo_backward steps inside of backward, before gradients could be averaged or clipped, which Lockstep "
            "does not do. Call backward(loss) and optimizer.step() with another optimizer."
        )

    def gather_for_loss(self, tensors: Tree) -> Tree:
        """Concatenate the tensors of all ranks along dim 0. Gradients flow back through the result.

        Use it for a loss over the global batch, such as a contrastive loss. Each rank computes the same loss from it.
        ``backward(loss)`` then gives the gradients of one process with the global batch. Rows that only pad the last
        batch are left out. Either all ranks use the result in their loss, or none.

        Args:
            tensors: Nested tensors of shape [n_r, ...] on rank r, with one row for each row of the batch. They become
                [sum of n_r, ...]. Tensors without a gradient, such as labels, are returned without one.

        Raises:
            UsageError: a batch is padded, and a tensor does not have its number of rows. All ranks raise it.
            CollectiveMismatchError: tensors of the ranks differ in more than their rows. All ranks raise it.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = accelerator.prepare(torch.nn.Linear(4, 2))
            ours = model(torch.randn(8, 4, device=accelerator.device))
            all_of_them = accelerator.gather_for_loss(ours)  # [8 * ranks, 2]
            accelerator.backward((all_of_them @ all_of_them.T).square().mean())
            ```
        """
        for observer in RunObserver.registered if torch.is_grad_enabled() else ():
            observer.gathers_for_loss()
        with waiting_for_ranks():
            return gather_for_loss(self._data_communicator, self._step, tensors, self.meshes.data_rank)

    def train_step(
        self,
        model: nn.Module,
        loss_function: LossFunction,
        inputs: object,
        targets: object = (),
        *,
        weight: torch.Tensor | float | None = None,
    ) -> torch.Tensor:
        """Compute forward, loss and backward of one micro-batch. A pipeline runs them in the order of its schedule.

        If the loss is computed outside of the model, a pipeline needs this method for any schedule other than
        GPipe's. For other models, it does what these three lines do: call the model, call ``loss_function``, call
        ``backward``.

        Args:
            loss_function: A function of the model's output and of ``targets``. It returns the mean over the batch,
                0-d.
            inputs: The arguments of the model: one value, a tuple of values, or a mapping of keywords. A pipeline
                cuts tensors of shape [batch, ...]. Without a pipeline, tensors may have any shape.
            targets: The further arguments of ``loss_function``: one value or a tuple. A pipeline cuts them into
                micro-batches as it cuts the inputs.
            weight: See ``backward``; a number or a 0-d tensor.

        Returns:
            The loss on every rank, 0-d and detached.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = torch.nn.Linear(4, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            loss = accelerator.train_step(model, torch.nn.functional.mse_loss, torch.randn(8, 4), torch.randn(8, 1))
            optimizer.step()
            ```
        """
        parallel = self._preparation.models.parallel_of(model)
        if parallel.runs_micro_batches:
            self._preparation.verifications.before_step(model, loss_function, *call_of(inputs, targets))
            with self.measures.call_in_parts(model, inputs):
                loss = parallel.loss_of(loss_function, inputs, targets, self.autocast)
        else:
            loss = parallel.loss_of(loss_function, inputs, targets, self.autocast)
        self.backward(loss, weight=weight)
        return loss.detach()

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Put one micro-batch inside of the block: its forward, ``backward`` and optimizer step.

        The optimizer steps only in each ``gradient_accumulation_steps``-th block, and the ranks average the gradients
        before it.

        Args:
            models: The prepared models that the block trains.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator(gradient_accumulation_steps=4)
            model = torch.nn.Linear(4, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in torch.randn(8, 2, 4):  # 8 micro-batches, so 2 steps
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
            ```
        """
        return self._accumulation.accumulate(models)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Let ``backward`` add to this rank's own gradients inside of the block, without averaging them over the ranks.

        Args:
            model: A prepared model. Gradients of other models are averaged.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = accelerator.prepare(torch.nn.Linear(4, 1))
            first, second = torch.randn(2, 8, 4)
            with accelerator.no_sync(model):
                accelerator.backward(model(first).square().mean())
            accelerator.backward(model(second).square().mean())  # averages the sum of both over the ranks
            ```
        """
        return self._accumulation.no_sync([model])

    def alone(self, model: nn.Module) -> AbstractContextManager[None]:
        """Let each rank train a model by itself inside of the block.

        Gradients are not averaged, and a ``weight`` of ``backward`` counts only for this rank.

        Args:
            model: The prepared model.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = accelerator.prepare(torch.nn.Linear(4, 1))
            with accelerator.alone(model), accelerator.communication() as counter:
                accelerator.backward(model(torch.randn(8, 4)).sum())
            assert counter.wire_bytes() == 0  # the gradients stay on this rank
            ```
        """
        for observer in RunObserver.registered:
            observer.trains_alone()
        return self._accumulation.alone([model])

    def summon_full_params(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Gather the whole weights on each rank once, and yield the unwrapped model. Use it to generate text.

        Every rank must enter and leave the block. Inside, a forward of the yielded model sends nothing. So the ranks
        may call it different numbers of times, or never, and ``generate`` stops on each rank when its own rows are
        done. No gradients are recorded. If weights are changed inside, all ranks must change them alike. At the end
        the gathered weights are freed, and an exception on one rank is raised on all ranks. Under ``ddp`` and in one
        process nothing is gathered.

        Raises:
            UsageError: the model was not prepared here, or is split by tp, pp, cp or ep. Inside of the block, it is
                raised by backward, by an optimizer's step, and by calls that shard the weights again, such as
                ``state_dict``.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator(parallel="zero=3")
            model = accelerator.prepare(torch.nn.Linear(4, 4))
            x = torch.ones(1, 4)
            with accelerator.summon_full_params(model) as whole:
                for _ in range(3 + accelerator.process_index):  # ranks need not agree
                    x = whole(x)
            ```
        """
        from lockstep.preparation.summon import summon_full_params  # few runs need it

        splits = self._options.parallel.splits_forward
        return summon_full_params(self._preparation, self._communicator, splits, model)

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> AbstractContextManager[None]:
        """Let ``backward`` average gradients over the ranks inside of the block, even if the last forward ran in
        ``no_sync``.

        Args:
            model: The prepared model.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = accelerator.prepare(torch.nn.Linear(4, 1))
            with accelerator.no_sync(model):
                loss = model(torch.randn(8, 4)).square().mean()
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(loss)  # averages, although its forward ran in no_sync
            ```
        """
        return trigger_sync(model)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Run code outside of prepared models in their mixed precision, too, inside of the block.

        Args:
            autocast_handler: Options of autocast. None: those of the ``Accelerator``.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator(mixed_precision="bf16")
            x = torch.randn(4, 4, device=accelerator.device)
            with accelerator.autocast():
                product = x @ x
            assert product.dtype == torch.bfloat16
            ```
        """
        return autocast(
            self._options.mixed_precision, self.runtime.device, autocast_handler or self._options.autocast
        )

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the gradients by the loss scale, with fp16. Call it before you read or change gradients.

        It does so for all prepared optimizers, or only for those that are passed.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator, GradScalerKwargs

            accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=64.0)])
            model = torch.nn.Linear(4, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            accelerator.backward(model(torch.ones(8, 4)).mean())
            accelerator.unscale_gradients()  # now gradients may be looked at
            weight, bias = model.parameters()
            assert torch.allclose(bias.grad, torch.ones(1))
            ```
        """
        if self._scaler is None or not self._step.sync_gradients:
            return
        given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        for item in self._preparation.optimizers.prepared if optimizer is None else given:
            self._scaler.unscale(getattr(item, "optimizer", item))

    def clip_grad_norm_(
        self, parameters: clipping.Parameters, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale the gradients so that their total norm is at most ``max_norm``. Call it between ``backward`` and the
        step.

        Before the last micro-batch of an accumulation window, nothing is clipped.

        Args:
            parameters: One parameter or an iterable of them, of any shape.
            max_norm: The largest norm that is allowed.
            norm_type: The p of the p-norm: 2 is the Euclidean norm, ``float("inf")`` the largest absolute value.

        Returns:
            The norm before clipping, 0-d. It is the norm over all ranks for sharded parameters.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = torch.nn.Linear(4, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            accelerator.backward(model(torch.randn(8, 4)).square().mean())
            norm = accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)  # between backward and step
            optimizer.step()
            ```
        """
        parameters = self._preparation.registry.resolve(clipping.as_list(parameters))
        if self._scaler is not None:
            self._unscale_owners(parameters)
        return self._preparation.optimizers.clip_norm(
            parameters, max_norm, norm_type, self._step.sync_gradients
        )

    def clip_grad_value_(self, parameters: clipping.Parameters, clip_value: float) -> None:
        """Clamp each element of the gradients to [-clip_value, clip_value]. Call it between ``backward`` and the
        step.

        Before the last micro-batch of an accumulation window, nothing is clamped.

        Args:
            parameters: One parameter or an iterable of them, of any shape.
            clip_value: The largest absolute value that is allowed.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = torch.nn.Linear(4, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            accelerator.backward(100 * model(torch.ones(8, 4)).sum())
            accelerator.clip_grad_value_(model.parameters(), 0.5)  # between backward and step
            assert all(parameter.grad.abs().max() == 0.5 for parameter in model.parameters())
            ```
        """
        parameters = self._preparation.registry.resolve(clipping.as_list(parameters))
        self._unscale_owners(parameters)
        observers = RunObserver.registered if self._step.sync_gradients else []
        for observer in observers:
            observer.before_clip()
        clipping.clip_value(parameters, clip_value, self._step.sync_gradients)
        for observer in observers:
            observer.clipped(None)

    def _unscale_owners(self, parameters: list[torch.Tensor]) -> None:
        if self._scaler is not None and self._step.sync_gradients:
            self._scaler.unscale_owners(parameters)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of fp16; None with other precisions. To scale by another one, set it between two steps."""
        return self._scaler.scaler if self._scaler is not None else None

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        from lockstep.train.loss_scale import scale_by

        scale_by(scaler, self._scaler)

    @property
    def step(self) -> int:
        """The number of micro-batches in ``accumulate`` since the loader began. With 0, a new window begins."""
        return self._step.micro_batch

    @step.setter
    def step(self, number: int) -> None:
        self._step.micro_batch = number

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of micro-batches in one optimizer step. To change it, set it between two steps."""
        return self._step.accumulation_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self._step.accumulation_steps = GradientAccumulationPlugin(num_steps=steps).num_steps or 1

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch ends an accumulation window."""
        return self._step.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._step.sync_gradients = value

    @property
    def gradient_state(self) -> StepState:
        """The state of the current step: whether gradients are averaged, and whether a loader is at its end."""
        return self._step

    @gradient_state.setter
    def gradient_state(self, state: StepState) -> None:
        if state is not self._step:
            raise UsageError(
                "gradient_state was set to that of another Accelerator, but each has its own. Set the attributes of "
                "this one, such as accelerator.gradient_state.sync_gradients."
            )

    @property
    def spikes(self) -> SpikeWatch | None:
        """Counts of the steps and batches that the ``SpikePolicy`` has skipped so far. None: there is no policy."""
        return self._preparation.spikes

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any optimizer was skipped by fp16's loss scaler or by a policy. All ranks agree."""
        return any(optimizer.step_was_skipped for optimizer in self._preparation.optimizers.prepared)

    def state_bytes(self) -> StateBytes:
        """Count the bytes on this rank: weights and gradients of prepared models, and state of their optimizers.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator(parallel="zero=3")
            model = torch.nn.Linear(64, 64, bias=False)
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
            held = accelerator.state_bytes()
            assert held.weights == 64 * 64 * 4 // accelerator.num_processes  # each rank has its share
            ```
        """
        self._preparation.finish_steps()
        from lockstep.observe.state_bytes import count_state

        return count_state(self._preparation.models.prepared, self._preparation.optimizers.prepared)
