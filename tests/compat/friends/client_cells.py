"""Trainers of other packages, each unmodified: its own loop, on tiny models and data."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from cell import Result, cell
from torch import nn
from torch.utils.data import Dataset

if importlib.util.find_spec("torchvision") is not None:
    # Its wheel is for CUDA. Beside a torch for CPUs its operators are missing, and only these two stop its import.
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            torch.library.define(
                f"torchvision::{operator}", "(Tensor boxes, Tensor scores, float least) -> Tensor"
            )


def state() -> PartialState:
    return PartialState(cpu=True)


def rank_by_rank(model: nn.Module, folder: Path, seeded: bool = False) -> list[dict[str, Any]]:
    """The losses that a model returns; makes the folder for its trainer.

    Several ranks read the data in its order, and each draws its own noise. Without this, both libraries draw an order
    of their own on several ranks. ``seeded``: forwards draw the same on one rank too, for data sets that draw in the
    main process: Accelerate reads a batch ahead.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []

    def seed(*_: object) -> None:
        set_seed(1000 * state().process_index + len(found))

    def note(model: nn.Module, inputs: object, output: Any) -> None:
        loss = output[0] if isinstance(output, tuple) else output
        if isinstance(loss, torch.Tensor) and loss.ndim == 0:
            found.append({"loss": loss.item()})

    def in_order(sampler: torch.utils.data.RandomSampler) -> Iterator[int]:
        return iter(range(len(sampler.data_source)))  # type: ignore[arg-type]

    if seeded or state().num_processes > 1:
        model.register_forward_pre_hook(seed)
    if state().num_processes > 1:
        torch.utils.data.RandomSampler.__iter__ = in_order  # type: ignore[method-assign]
    model.register_forward_hook(note)
    return found


class Pictures(Dataset[torch.Tensor]):
    def __init__(self, count: int, size: int = 16, channels: int = 3) -> None:
        source = torch.Generator().manual_seed(0)
        pictures = torch.rand(count, channels, size, size, generator=source)
        # A picture is its own mirror image, so that random flips change nothing.
        self.pictures = (pictures + pictures.flip(-1)) / 2

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.pictures[row]


def in_files(folder: Path, count: int, size: int = 16) -> Path:
    """Pictures as files, written by the main process."""
    from PIL import Image

    place = folder / "pictures"
    if state().is_main_process:
        place.mkdir(parents=True, exist_ok=True)
        for number, picture in enumerate(Pictures(count, size).pictures):
            pixels = (picture * 255).byte().permute(1, 2, 0).numpy()
            Image.fromarray(pixels).save(place / f"{number:03}.png")
    state().wait_for_everyone()
    return place


def result(losses: list[dict[str, Any]], trainer: Any, model: Any, *written: Path) -> Result:
    """``written``: files that the main process should have written."""
    assert not state().is_main_process or all(place.exists() for place in written)
    return losses, trainer.accelerator.get_state_dict(model)


@cell
def denoising_diffusion(folder: Path) -> Result:
    from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet

    set_seed(0)
    model = GaussianDiffusion(Unet(8, dim_mults=(1, 2), flash_attn=False), image_size=16, timesteps=10)
    losses = rank_by_rank(model, folder)
    trainer = Trainer(
        model,
        str(in_files(folder, 100)),
        train_batch_size=8,
        gradient_accumulate_every=2,
        train_lr=1e-3,
        train_num_steps=8,
        ema_update_every=2,
        save_and_sample_every=4,
        num_samples=4,
        augment_horizontal_flip=False,
        results_folder=str(folder / "results"),
        calculate_fid=False,
        # Accelerate ignores it, so that its global batch is larger.
        split_batches=False,
    )
    trainer.train()
    results = folder / "results"
    return result(losses, trainer, trainer.model, results / "model-2.pt", results / "sample-2.png")


@cell
def rin(folder: Path) -> Result:
    from rin_pytorch import RIN, GaussianDiffusion, Trainer

    set_seed(0)
    network = RIN(16, 16, patch_size=4, depth=1, latent_self_attn_depth=1, num_latents=4, dim_head=8, heads=2)
    model = GaussianDiffusion(network, timesteps=10)
    losses = rank_by_rank(model, folder)
    trainer = Trainer(
        model,
        dataset=Pictures(24),
        train_batch_size=4,
        gradient_accumulate_every=2,
        train_lr=1e-3,
        train_num_steps=8,
        save_and_sample_every=4,
        num_samples=4,
        results_folder=str(folder / "results"),
        split_batches=False,
    )
    trainer.train()
    results = folder / "results"
    return result(losses, trainer, trainer.model, results / "model-1.pt", results / "sample-1.png")


@cell
def rectified_flow(folder: Path) -> Result:
    from rectified_flow_pytorch import RectifiedFlow, Trainer, Unet

    set_seed(0)
    model = RectifiedFlow(Unet(8, dim_mults=(1, 2)))
    losses = rank_by_rank(model, folder)
    trainer = Trainer(
        model,
        dataset=Pictures(24),
        num_train_steps=8,
        batch_size=4,
        learning_rate=1e-3,
        grad_accum_every=2,
        # It samples with a batch of the main process's loader alone, for which Accelerate's ranks wait.
        save_results_every=4 if state().num_processes == 1 else 100,
        checkpoint_every=4,
        num_samples=4,
        # Some parameters have no gradient.
        accelerate_kwargs={"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]},
        checkpoints_folder=str(folder / "checkpoints"),
        results_folder=str(folder / "results"),
    )
    trainer()
    return result(losses, trainer, trainer.model, *(folder / "checkpoints").iterdir())


@cell
def muse_maskgit(folder: Path) -> Result:
    from muse_maskgit_pytorch import VQGanVAE, VQGanVAETrainer

    set_seed(0)
    vgg = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8))
    model = VQGanVAE(dim=16, layers=2, discr_layers=2, codebook_size=64, vgg=vgg)
    losses = rank_by_rank(model, folder, seeded=True)
    trainer = VQGanVAETrainer(
        model,
        folder=str(in_files(folder, 48)),
        num_train_steps=6,
        batch_size=4,
        image_size=16,
        grad_accum_every=1,
        save_results_every=2,
        save_model_every=2,
        results_folder=str(folder / "results"),
    )
    trainer.train()
    return result(losses, trainer, trainer.vae)


@cell
def magvit2(folder: Path) -> Result:
    from magvit2_pytorch import VideoTokenizer, VideoTokenizerTrainer

    set_seed(0)
    vgg = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8))
    model = VideoTokenizer(
        image_size=16,
        init_dim=8,
        codebook_size=16,
        layers=("residual", "compress_space"),
        vgg=vgg,
        flash_attn=False,
    )
    losses = rank_by_rank(model, folder, seeded=True)
    trainer = VideoTokenizerTrainer(
        model,
        dataset_folder=str(in_files(folder, 40)),
        dataset_type="images",
        batch_size=4,
        num_train_steps=4,
        learning_rate=1e-3,
        grad_accum_every=2,
        warmup_steps=2,
        valid_frac=0.3,
        validate_every_step=2,
        checkpoint_every_step=2,
        checkpoints_folder=str(folder / "checkpoints"),
        results_folder=str(folder / "results"),
    )
    trainer.train()
    return result(losses, trainer, trainer.model)


@cell
def imagen(folder: Path) -> Result:
    import transformers

    # It asks for the width of an encoder while it is imported, and the Hub is not reached here.
    transformers.T5Config.from_pretrained = lambda name: transformers.T5Config(d_model=8)  # type: ignore
    from imagen_pytorch import Imagen, ImagenTrainer, Unet

    set_seed(0)
    unet = Unet(dim=8, dim_mults=(1, 2), cond_on_text=False, layer_attns=False, layer_cross_attns=False)
    losses = rank_by_rank(unet, folder)
    trainer = ImagenTrainer(
        Imagen(unet, image_sizes=16, timesteps=5, condition_on_text=False),
        lr=1e-3,
        max_grad_norm=1.0,
        warmup_steps=2,
        split_batches=False,
        verbose=False,
    )
    trainer.add_train_dataset(Pictures(24), batch_size=4)
    for _ in range(6):
        losses.append({"loss": trainer.train_step(unet_number=1)})
    if trainer.is_main:
        assert trainer.sample(batch_size=1).shape == (1, 3, 16, 16)
    trainer.save(str(folder / "imagen.pt"))
    return losses, trainer.accelerator.get_state_dict(trainer.unet_being_trained)


@cell
def skorch(folder: Path) -> Result:
    from accelerate import Accelerator
    from skorch import NeuralNetClassifier
    from skorch.hf import AccelerateMixin

    class Net(AccelerateMixin, NeuralNetClassifier):  # type: ignore[misc]
        """As skorch's own guide defines it."""

    set_seed(0)
    pictures = Pictures(40).pictures.flatten(1)
    module = nn.Sequential(nn.Linear(pictures.shape[1], 8), nn.Tanh(), nn.Linear(8, 2))
    losses = rank_by_rank(module, folder)
    accelerator = Accelerator(gradient_accumulation_steps=1)
    net = Net(
        module,
        accelerator=accelerator,
        device=None,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        lr=1e-3,
        max_epochs=3,
        batch_size=8,
        train_split=None,
        iterator_train__shuffle=True,
        verbose=0,
    )
    net.fit(pictures, (pictures.mean(1) > pictures.mean()).long())
    losses += [{"loss": line["train_loss"]} for line in net.history]
    return losses, accelerator.get_state_dict(net.module_)


@cell
def setfit(folder: Path) -> Result:
    from cell import sentences
    from datasets import Dataset as Table
    from embedding_cells import embedder
    from setfit import SetFitModel, Trainer, TrainingArguments
    from sklearn.linear_model import LogisticRegression

    model = SetFitModel(model_body=embedder(folder), model_head=LogisticRegression())
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            batch_size=4,
            num_epochs=1,
            max_steps=8,
            body_learning_rate=1e-3,
            logging_steps=1,
            report_to="none",
            show_progress_bar=False,
            save_strategy="no",
            seed=3,
        ),
        train_dataset=Table.from_dict({"text": sentences(16, 4, 10, 1), "label": [0, 1] * 8}),
    )
    trainer.train()
    return trainer.st_trainer.state.log_history, trainer.st_trainer.accelerator.get_state_dict(
        model.model_body
    )


@cell
def fastai(folder: Path) -> Result:
    import fastai.callback.schedule
    import fastai.distributed  # noqa: F401
    from fastai.basics import DataLoader, DataLoaders, Learner

    set_seed(0)
    pictures = Pictures(32).pictures.flatten(1)
    rows = list(zip(pictures, (pictures.mean(1) > pictures.mean()).long(), strict=True))
    loaders = DataLoaders(
        DataLoader(rows, bs=4, shuffle=state().num_processes == 1), DataLoader(rows[:8], bs=4), device="cpu"
    )
    model = nn.Sequential(nn.Linear(pictures.shape[1], 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    learner = Learner(loaders, model, loss_func=nn.CrossEntropyLoss(), path=folder, metrics=[])
    losses: list[dict[str, Any]] = []
    # SyncBatchNorm is for GPUs, and so are the indices that its loader broadcasts.
    torch.Tensor.cuda = lambda self: self  # type: ignore[method-assign, assignment]
    with learner.no_bar(), learner.distrib_ctx(sync_bn=False):
        learner.fit_one_cycle(2, 1e-2)
    losses += [{"loss": float(loss)} for loss in learner.recorder.losses]
    losses += [
        dict(zip(("train", "valid"), map(float, line), strict=False)) for line in learner.recorder.values
    ]
    return losses, {name: value.float() for name, value in model.state_dict().items()}


@cell
def accmt(folder: Path) -> Result:
    import transformers

    # transformers 5 has it no more, and the package imports it.
    if not hasattr(transformers, "DataCollatorForWholeWordMask"):
        transformers.DataCollatorForWholeWordMask = transformers.DataCollatorForLanguageModeling
    import accmt as library

    class Module(library.AcceleratorModule):  # type: ignore[misc]
        def __init__(self) -> None:
            self.model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8), nn.Tanh(), nn.Linear(8, 1))

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            loss = (self.model(batch).squeeze(1) - batch.mean((1, 2, 3))).square().mean()
            losses.append({"loss": loss.item()})
            return loss

        def validation_step(self, key: object, batch: torch.Tensor) -> dict[str, torch.Tensor]:
            loss = (self.model(batch).squeeze(1) - batch.mean((1, 2, 3))).square().mean()
            losses.append({"checked": loss.item()})
            return {"loss": loss}

    losses: list[dict[str, Any]] = []
    library.accelerator.free_memory()
    set_seed(0)
    trainer = library.Trainer(
        hps_config=library.HyperParameters(
            epochs=2,
            batch_size=4,
            optimizer="AdamW",
            optim_kwargs={"lr": 1e-3},
            scheduler="LinearWithWarmup",
            scheduler_kwargs={"warmup_ratio": 0.2},
        ),
        model_path=str(folder / "model"),
        track_name="tiny",
        grad_accumulation_steps=2,
        checkpoint_every="2steps",
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        destroy_after_training=False,
    )
    module = Module()
    trainer.fit(module, Pictures(32), Pictures(8))
    return losses, library.accelerator.get_state_dict(module.model)


@cell
def lm_eval(folder: Path) -> Result:
    """Several processes divide the requests; it looks for as many GPUs."""
    import json
    from unittest import mock

    import lm_eval as library
    from cell import gpt2, save_once, sentences, tokenizer
    from lm_eval.tasks import TaskManager

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        gpt2().save_pretrained(folder / "model")
        tokenizer().save_pretrained(folder / "model")
        rows = [
            {"question": text, "choices": text.split()[:3], "answer": 1} for text in sentences(13, 4, 8, 5)
        ]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        shared = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        }
        tasks = {
            "choose": {
                "output_type": "multiple_choice",
                "doc_to_text": "{{question}}",
                "doc_to_target": "{{answer}}",
                "doc_to_choice": "{{choices}}",
                "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
            },
            "continue": {
                "output_type": "loglikelihood_rolling",
                "doc_to_text": "",
                "doc_to_target": "{{question}}",
                "metric_list": [{"metric": "word_perplexity"}],
            },
            "generate": {
                "output_type": "generate_until",
                "doc_to_text": "{{question}}",
                "doc_to_target": "{{choices[1]}}",
                "generation_kwargs": {"until": ["w5"], "max_gen_toks": 6},
                "metric_list": [{"metric": "exact_match"}],
            },
        }
        (folder / "tasks").mkdir()
        for name, task in tasks.items():
            whole = {"task": f"tiny_{name}", "test_split": "test", **shared, **task}
            (folder / "tasks" / f"{name}.yaml").write_text(json.dumps(whole))

    state()
    save_once(write)
    with mock.patch("torch.cuda.device_count", return_value=state().num_processes):
        results = library.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(folder / "model"), "device": "cpu"},
            tasks=["tiny_choose", "tiny_continue", "tiny_generate"],
            task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
            batch_size=2,
        )
    if results is None:  # not the main process
        return [], {}
    samples = [
        {"sample": float(sum(map(ord, json.dumps(line["resps"], default=str))))}
        for lines in results["samples"].values()
        for line in lines
    ]
    measured = [
        {name.partition(",")[0]: value for name, value in line.items() if isinstance(value, float)}
        for line in results["results"].values()
    ]
    return measured + samples, {"none": torch.ones(1)}
