"""A script as diffusers' example of unconditional training is: accelerate by hand, averaged weights, save hooks."""

from __future__ import annotations

import logging
import math
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import torch
import torch.nn.functional as F
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.logging import get_logger
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from cell import Result, cell
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel

logger = get_logger(__name__, log_level="INFO")


class Images(torch.utils.data.Dataset):
    def __init__(self, count: int) -> None:
        self.rows = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input": self.rows[index]}


def unet() -> UNet2DModel:
    return UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )


def train(
    folder: Path,
    epochs: int = 2,
    checkpointing_steps: int = 5,
    resume: str | None = None,
) -> Result:
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        log_with="tensorboard",
        project_config=ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "logs")),
        # The one change: the order of samples that is the same on both sides with several processes.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=7200))],
    )
    set_seed(0)

    # What the example does: checkpoints of the model's own format, beside the optimizer's.
    def save_model_hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if accelerator.is_main_process:
            ema_model.save_pretrained(os.path.join(output_dir, "unet_ema"))
            for model in models:
                model.save_pretrained(os.path.join(output_dir, "unet"))
                weights.pop()

    def load_model_hook(models: list[Any], input_dir: str) -> None:
        load_model = EMAModel.from_pretrained(os.path.join(input_dir, "unet_ema"), UNet2DModel)
        ema_model.load_state_dict(load_model.state_dict())
        ema_model.to(accelerator.device)
        for _ in range(len(models)):
            model = models.pop()
            load_model = UNet2DModel.from_pretrained(input_dir, subfolder="unet")
            model.register_to_config(**load_model.config)
            model.load_state_dict(load_model.state_dict())

    accelerator.register_save_state_pre_hook(save_model_hook)
    accelerator.register_load_state_pre_hook(load_model_hook)
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    diffusers.utils.logging.set_verbosity_error()
    if accelerator.is_main_process:
        os.makedirs(folder, exist_ok=True)
    model = unet()
    ema_model = EMAModel(
        model.parameters(),
        decay=0.9,
        use_ema_warmup=True,
        inv_gamma=1.0,
        power=0.75,
        model_cls=UNet2DModel,
        model_config=model.config,
    )
    noise_scheduler = DDPMScheduler(num_train_timesteps=20, beta_schedule="linear")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.95, 0.999), weight_decay=1e-6, eps=1e-5
    )
    dataset = Images(96)
    train_dataloader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True, num_workers=0)
    lr_scheduler = get_scheduler(
        "cosine", optimizer=optimizer, num_warmup_steps=2, num_training_steps=len(train_dataloader) * epochs
    )
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    ema_model.to(accelerator.device)
    if accelerator.is_main_process:
        accelerator.init_trackers("train_unconditional")
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / accelerator.gradient_accumulation_steps)
    global_step = first_epoch = resume_step = 0
    if resume:
        accelerator.load_state(resume)
        global_step = int(os.path.basename(resume).split("-")[1])
        resume_global_step = global_step * accelerator.gradient_accumulation_steps
        first_epoch = global_step // num_update_steps_per_epoch
        resume_step = resume_global_step % (
            num_update_steps_per_epoch * accelerator.gradient_accumulation_steps
        )
    logs: list[dict[str, Any]] = []
    for epoch in range(first_epoch, epochs):
        model.train()
        rest = train_dataloader
        # The example passes over these batches with `continue`, which is refused after load_state (data.md).
        if resume and epoch == first_epoch:
            rest = accelerate.skip_first_batches(train_dataloader, resume_step)
        for batch in rest:
            clean_images = batch["input"]
            # The example draws noise from the global generator; here it follows from the data, so that runs that
            # were resumed, or have other numbers of processes, are comparable.
            own = torch.Generator().manual_seed(int(clean_images.abs().sum() * 1000) % 2**31)
            noise = torch.randn(clean_images.shape, generator=own)
            timesteps = torch.randint(0, 20, (clean_images.shape[0],), generator=own).long()
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
            with accelerator.accumulate(model):
                model_output = model(noisy_images, timesteps).sample
                loss = F.mse_loss(model_output.float(), noise.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema_model.step(model.parameters())
                global_step += 1
                if checkpointing_steps and global_step % checkpointing_steps == 0:
                    accelerator.save_state(str(folder / f"checkpoint-{global_step}"))
            mean = accelerator.reduce(loss.detach(), reduction="mean")
            logs.append({"loss": mean.item(), "lr": lr_scheduler.get_last_lr()[0], "step": global_step})
            accelerator.log(logs[-1], step=global_step)
        accelerator.wait_for_everyone()
    weights = accelerator.get_state_dict(model)
    weights |= {f"ema.{i}": p for i, p in enumerate(ema_model.shadow_params)}
    accelerator.end_training()
    return logs, weights


@cell
def unconditional(folder: Path) -> Result:
    """Leaves ``checkpoint-5``, 10 and 15."""
    return train(folder)


@cell
def unconditional_resumed(folder: Path) -> Result:
    """Goes on inside of the second epoch, from the checkpoint that ``unconditional`` left."""
    origin = folder.parent / folder.name.replace("_resumed", "")
    return train(folder, resume=str(origin / "checkpoint-10"))
