"""What a script does with the batches of a run, as methods of ``Accelerator``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from lockstep.errors import ConfigError
from lockstep.parallel import ddp
from lockstep.preparation.parts import AcceleratorParts

Loader = TypeVar("Loader")


class BatchMethods(AcceleratorParts):
    """Batches that ranks have in different numbers, that are left out, or that are cut along the sequence."""

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[object], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Allow ranks to have different numbers of batches inside of the block.

        A rank that has no more batches takes part in the averages of the others, until all ranks have none. Gradient
        accumulation is refused inside.

        Args:
            joinables: The prepared models that are trained, replicated by DDP.
            even_batches: Replaces this setting of prepared loaders that read map-style data on every rank. If there
                are other prepared loaders, a warning says so. None: it is not changed.

        Raises:
            UsageError: a model is sharded, or ``prepare`` did not return it.

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
        loaders = list(self._preparation.loaders.prepared)
        before = [loader.even_batches for loader in loaders]
        try:
            if even_batches is not None and self.runtime.world_size > 1:
                self._preparation.loaders.override_even_batches(even_batches)
            with ddp.join_replicas(joinables, self.runtime.world_size), self._accumulation.uneven_inputs():
                yield
        finally:
            for loader, value in zip(loaders, before, strict=True):
                loader.even_batches = value

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader that leaves out the first batches of another loader, in each iteration.

        Args:
            dataloader: A ``DataLoader``, prepared or not. Items of map-style datasets that are left out are not read.
            num_batches: The number of batches.

        Raises:
            ConfigError: ``num_batches`` is negative.
            UsageError: the loader has fewer than ``num_batches`` batches.

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
        from lockstep.data.skip import skip_first_batches

        return skip_first_batches(dataloader, num_batches)

    def deepspeed_ulysses_dl_adapter(self, dataloader: Loader, model: object) -> Loader:
        """Return ``dataloader`` as it is, for scripts written for DeepSpeed's Ulysses.

        ``prepare`` cuts the batches along the sequence if it gets the loader together with the model.

        Raises:
            ConfigError: with ``ParallelismConfig(sp_size=...)``, the loader was prepared in another call than the
                model, as Trainer does.

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
        if not getattr(config, "sp_enabled", False) or self._preparation.loaders.gives_chunks(dataloader):
            return dataloader
        raise ConfigError(
            "The loader was not prepared in the same call as the model. With sp_size, scripts that do so, such as "
            "Trainer, count its batches once for each rank. Pass both to one prepare, or use cp_size."
        )

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Make each of the ``buffers`` this rank's chunk of the sequence inside of the block, and let models compute on
        chunks.

        All outputs of the models are chunks too, such as logits. Pass every tensor that depends on the position:
        inputs, ``position_ids``, and labels. Shift the labels before. The loss is the mean over the chunk.
        Without ``cp`` nothing happens.

        Args:
            buffers: Tensors such as [batch, sequence, ...]. Along the dim of the sequence, all have the same length.
            buffer_seq_dims: For each buffer, the dim of the sequence.
            no_restore_buffers: Buffers that stay a chunk, [batch, sequence / cp, ...], after the block. The others
                become whole again.

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
            [model.module for model in self._preparation.models.prepared],
            buffers or [],
            buffer_seq_dims or [],
            no_restore_buffers or set(),
        )
