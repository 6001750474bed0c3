"""What a script does inside of a step, and where that stands, as methods of ``Accelerator``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.comm.collectives import Communicator
from lockstep.comm.methods import gather_for_loss
from lockstep.comm.tree import LossFunction, Tree
from lockstep.config.handlers import AutocastKwargs, GradientAccumulationPlugin
from lockstep.config.options import Options
from lockstep.data.skip import skip_first_batches
from lockstep.errors import ConfigError
from lockstep.observe.state_bytes import StateBytes, count_state
from lockstep.parallel import ddp
from lockstep.parallel.autocast import autocast
from lockstep.parallel.parallel_model import PipelinedModel, call_of
from lockstep.preparation.observers import RunObserver
from lockstep.runtime.mesh import DeviceMeshes
from lockstep.runtime.process import Runtime
from lockstep.runtime.step import StepState, waiting_for_ranks
from lockstep.train import clipping
from lockstep.train.accumulation import Accumulation, trigger_sync

if TYPE_CHECKING:
    from lockstep.observe.measures.measures import Measures
    from lockstep.observe.spikes.watch import SpikeWatch
    from lockstep.preparation.prepare import Preparation
    from lockstep.train.loss_scale import LossScaler


class TrainingMethods:
    """Methods that need the prepared objects, and where the step is."""

    runtime: Runtime
    _options: Options
    _step: StepState
    _scaler: LossScaler | None

    if TYPE_CHECKING:  # each made when it is first used

        @property
        def meshes(self) -> DeviceMeshes: ...
        @property
        def _communicator(self) -> Communicator: ...
        @property
        def _preparation(self) -> Preparation: ...
        @property
        def _accumulation(self) -> Accumulation: ...
        @property
        def measures(self) -> Measures: ...
        @property
        def _data_communicator(self) -> Communicator: ...

    def backward(
        self, loss: torch.Tensor, *, weight: torch.Tensor | float | None = None, **kwargs: object
    ) -> None:
        """Add the gradient of this micro-batch.

        Without ``weight``, the window's gradient is the mean over its micro-batches and ranks of
        ``loss`` (as in Accelerate). With it, it is the gradient of ``sum(weight * loss) / sum(weight)``
        over all of them: exactly that of one big batch when the weights are sample or token counts.

        Args:
            loss: 0-d, or with ``weight`` unreduced losses of any shape.
            weight: What a 0-d loss is the mean of, or a weight for each element of ``loss``
                (see ``sample_weights``). All ranks must pass one, or none.
            kwargs: Of ``torch.Tensor.backward``.

        Raises:
            UsageError: no prepared model was called, or weights do not fit.

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
        if self._step.being_saved is not None:
            self._step.being_saved.before_backward()
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

    def gather_for_loss(self, tensors: Tree) -> Tree:
        """Nested tensors of all ranks, [n_r, ...] to [sum of n_r, ...], through which gradients flow back.

        For a loss over the global batch, as a contrastive one, which every rank computes alike of what is gathered.
        With ``backward(loss)`` the gradients are those of one process with that batch. Rows that only pad the last
        batch are left out. All ranks must use the result in their loss, or none.

        Args:
            tensors: With one row for each row of the batch. Those without a gradient, as labels, come back without.

        Raises:
            UsageError: in a padded batch a tensor has another number of rows; on all ranks.
            CollectiveMismatchError: tensors of the ranks differ in more than their rows; on all ranks.

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
        """Forward, loss and backward of one micro-batch; with a pipeline in the order of its schedule.

        Where the loss is computed outside of the model, this is the way to have another schedule than GPipe's. Other
        models do the same as three lines would.

        Args:
            loss_function: Called with the model's output and ``targets``; a mean over the batch, 0-d.
            inputs: What the model is called with: one value, a tuple of them, or a mapping of keywords. Tensors
                are [batch, ...] where a pipeline cuts them, else of any shape.
            targets: One value or a tuple of them, cut into the pipeline's micro-batches as the inputs are.
            weight: See ``backward``; a number or 0-d.

        Returns:
            The loss, 0-d and detached, on every rank.

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
        parallel = self._preparation.parallel_of(model)
        if isinstance(parallel, PipelinedModel):
            self._preparation.verifications.before_step(model, loss_function, *call_of(inputs, targets))
            with self.measures.call_in_parts(model, inputs):
                loss = parallel.loss_of(loss_function, inputs, targets, self.autocast)
        else:
            loss = parallel.loss_of(loss_function, inputs, targets, self.autocast)
        self.backward(loss, weight=weight)
        return loss.detach()

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """One micro-batch of ``gradient_accumulation_steps``; gradients are averaged after the last.

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
        """Backward inside adds to this rank's gradients without averaging them.

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
        """Each rank trains this model by itself inside: gradients, and weights of ``backward``, are its own.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = accelerator.prepare(torch.nn.Linear(4, 1))
            with accelerator.alone(model), accelerator.communication() as ledger:
                accelerator.backward(model(torch.randn(8, 4)).sum())
            assert ledger.wire_bytes() == 0  # the gradients stay on this rank
            ```
        """
        for observer in RunObserver.registered:
            observer.trains_alone()
        return self._accumulation.alone([model])

    def summon_full_params(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Whole weights on each rank inside, gathered once: to generate, or to call the model as often as a rank likes.

        Every rank enters and leaves. Inside, no forward of the yielded model sends anything, so that ranks may call it
        different numbers of times, or never, and ``generate`` stops on each rank when its own rows are done. No
        gradients are recorded. At the end the gathered weights are freed, and an exception on one rank is raised on
        all. The yielded model is the unwrapped one; under ``ddp`` and in one process nothing is gathered. A change of
        weights inside must be the same on all ranks.

        Raises:
            UsageError: the model was not prepared here, or is split by tp, pp, cp or ep; or inside, for backward, an
                optimizer's step, or what shards the weights again, such as ``state_dict``.

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
        """Inside, backward averages gradients although the last forward ran in ``no_sync``.

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
        """Run other code in the precision in which prepared models run.

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
        """With fp16, divide gradients by the loss scale before looking at them (all optimizers, or these).

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
        optimizers = self._preparation.optimizers if optimizer is None else optimizer
        for item in optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]:
            self._scaler.unscale(getattr(item, "optimizer", item))

    def clip_grad_norm_(
        self, parameters: clipping.Parameters, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip the total norm of whole windows' gradients; returns the norm before (0-d).

        Parameters have any shape: one or an iterable. Inside an accumulation window nothing is clipped.

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
        parameters = self._preparation.shards_of(clipping.as_list(parameters))
        self._unscale_owners(parameters)
        return self._preparation.clip_norm(parameters, max_norm, norm_type, self._step.sync_gradients)

    def clip_grad_value_(self, parameters: clipping.Parameters, clip_value: float) -> None:
        """Clamp whole windows' gradients, of parameters of any shape, to [-clip_value, clip_value].

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
        parameters = self._preparation.shards_of(clipping.as_list(parameters))
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

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Train although ranks have different numbers of batches.

        ``even_batches`` overrides that of the prepared loaders inside, where they read map-style data on
        every rank; others are warned about. Several micro-batches a step are refused inside.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            model = torch.nn.Linear(4, 1)
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            batches = torch.randn(3 + accelerator.process_index, 2, 4)  # more on later ranks
            with accelerator.join_uneven_inputs([model]):
                for batch in batches:
                    accelerator.backward(model(batch).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
            ```
        """
        loaders = list(self._preparation.loaders)
        before = [loader.even_batches for loader in loaders]
        try:
            if even_batches is not None and self.runtime.world_size > 1:
                self._preparation.override_even_batches(even_batches)
            with ddp.join_replicas(joinables, self.runtime.world_size), self._accumulation.uneven_inputs():
                yield
        finally:
            for loader, value in zip(loaders, before, strict=True):
                loader.even_batches = value

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader without its first batches; costs no data for map-style datasets.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            loader = accelerator.prepare(torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=2))
            for batch in accelerator.skip_first_batches(loader, 3):  # of this epoch only; the next one uses loader
                print(batch.shape)
            ```
        """
        return skip_first_batches(dataloader, num_batches)

    def deepspeed_ulysses_dl_adapter(self, dataloader: object, model: object) -> Any:
        """The loader, whose batches ``prepare`` cuts along the sequence where it gets it together with the model.

        Raises:
            ConfigError: with ``ParallelismConfig(sp_size=...)`` it was prepared apart from the model, as Trainer does.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()
            loader = torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=8)
            model, loader = accelerator.prepare(torch.nn.Linear(4, 1), loader)
            assert accelerator.deepspeed_ulysses_dl_adapter(loader, model) is loader  # prepare did it
            ```
        """
        config = self._options.parallelism_config
        if not getattr(config, "sp_enabled", False) or self._preparation.is_dealt_out(dataloader):
            return dataloader
        raise ConfigError(
            "The loader was prepared apart from the model, but with sp_size scripts that do so, such as Trainer, count "
            "its batches once for each rank. Pass both to one prepare, or use cp_size."
        )

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[Any]:
        """Inside, these tensors are this rank's chunks of the sequence, and models work on chunks throughout.

        Then not even logits are whole on any rank. Everything that depends on the position must be among the buffers:
        inputs, ``position_ids``, and labels that were shifted before. The loss is the mean over the chunk. Without
        ``cp`` nothing happens.

        Args:
            buffers: Tensors of any shape, all of one length along their dim of the sequence: [batch, sequence, ...].
            buffer_seq_dims: That dim of each of them.
            no_restore_buffers: Those that keep their chunk, [batch, sequence / cp, ...], afterwards.

        Examples:
            ```python
            import torch
            from lockstep import Accelerator

            accelerator = Accelerator()  # on 4 ranks for example Accelerator(parallel="cp=4")
            model = accelerator.prepare(torch.nn.Embedding(100, 16))
            tokens = torch.randint(100, (2, 32))  # [batch, sequence]
            with accelerator.maybe_context_parallel(buffers=[tokens], buffer_seq_dims=[1]):
                output = model(tokens)  # [batch, sequence / cp, width]
            ```
        """
        if self.meshes.axes.cp == 1:
            return nullcontext()
        from lockstep.parallel.context.split import split_sequence

        return split_sequence(
            [model.module for model in self._preparation.models],
            buffers or [],
            buffer_seq_dims or [],
            no_restore_buffers or set(),
        )

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of fp16; None with other precisions."""
        return self._scaler.scaler if self._scaler is not None else None

    @property
    def gradient_accumulation_steps(self) -> int:
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
        return self._step

    @property
    def spikes(self) -> SpikeWatch | None:
        """What ``SpikePolicy`` has skipped so far; None: no policy was given."""
        return self._preparation.spikes

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether any optimizer's last step was skipped, by fp16's loss scaler or a policy, on all ranks alike."""
        return any(optimizer.step_was_skipped for optimizer in self._preparation.optimizers)

    def state_bytes(self) -> StateBytes:
        """Bytes of the prepared models' weights and gradients and of their optimizers' state, on this rank.

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
        self._preparation.offload.finish()
        return count_state(self._preparation.models, self._preparation.optimizers)
