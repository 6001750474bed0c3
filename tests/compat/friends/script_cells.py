"""Example scripts of other libraries, each unmodified, on tiny models and data that lie where it looks for them.

``EXAMPLES`` is a folder with a folder of each library's sources: ``transformers``, ``diffusers`` and ``peft``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import accelerate
import torch
import transformers
from accelerate import Accelerator
from cell import CELLS, Result, cell, sentences, tokenizer
from client_cells import Pictures, in_files, state
from torch import nn

EXAMPLES = Path(os.environ.get("EXAMPLES", "examples"))
TRANSFORMERS = "transformers/examples/pytorch"
sys.modules["evaluate"] = ModuleType("evaluate")
sys.modules["evaluate"].load = lambda *names, **options: Metric()  # type: ignore[attr-defined]
if not hasattr(accelerate.DistributedType, "TPU"):
    # Some scripts compare with it, though Accelerate itself has no such member any more.
    accelerate.DistributedType.TPU = "TPU"  # type: ignore[attr-defined]
if not hasattr(transformers.utils, "send_example_telemetry"):
    # Scripts of transformers 4 with transformers 5.
    transformers.utils.send_example_telemetry = lambda *names, **options: None  # type: ignore[attr-defined]


class Metric:
    """In place of a metric that would be downloaded: the share of predictions that are right."""

    def __init__(self) -> None:
        self.right: list[bool] = []

    def add_batch(self, *, references: Any, **predicted: Any) -> None:
        pairs = zip(*predicted.values(), references, strict=True)
        self.right += [bool(one == (other[0] if isinstance(other, list) else other)) for one, other in pairs]

    def compute(self, **options: Any) -> dict[str, float]:
        share = sum(self.right) / len(self.right)
        found.append({"share": share, "count": len(self.right)})
        self.right = []
        return dict.fromkeys(("accuracy", "score", "roc_auc"), share)


found: list[dict[str, Any]] = []
"""The losses of the script that runs, and its metrics."""


@contextlib.contextmanager
def observed(models: list[nn.Module], accelerators: list[Any]) -> Iterator[None]:
    """Note losses, and the models that are prepared."""
    backward, tensor_backward, prepare = Accelerator.backward, torch.Tensor.backward, Accelerator.prepare

    def by_accelerator(self: Any, loss: torch.Tensor, **options: Any) -> None:
        found.append({"loss": loss.item()})
        backward(self, loss, **options)

    def by_tensor(self: torch.Tensor, *args: Any, **options: Any) -> None:
        if sys._getframe(1).f_globals["__name__"] == "__main__":
            found.append({"loss": self.item()})
        tensor_backward(self, *args, **options)

    def prepared(self: Any, *objects: Any, **options: Any) -> Any:
        results = prepare(self, *objects, **options)
        several = results if isinstance(results, tuple) else (results,)
        models.extend(model for model in several if isinstance(model, nn.Module))
        accelerators[:] = [self]
        return results

    with (
        mock.patch.object(Accelerator, "backward", by_accelerator),
        mock.patch.object(Accelerator, "prepare", prepared),
        mock.patch.object(torch.Tensor, "backward", by_tensor),
        # At the end of a script the group stays, for the next one.
        mock.patch.object(torch.distributed, "destroy_process_group", return_value=None),
    ):
        yield


def read_alike() -> None:
    """Let what the data draw depend on the batch alone, and several ranks read the data in order.

    Accelerate reads a batch ahead, so that a loop that draws, too, has other numbers than one without Accelerate. On
    several ranks, both libraries draw an order of their own, and Accelerate's costs a number of the loop's generator.
    """
    fetcher = torch.utils.data._utils.fetch._MapDatasetFetcher

    def fetch(self: Any, rows: list[int]) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(hash(tuple(rows)))
            kept = random.getstate()
            random.seed(hash(tuple(rows)))
            batch = FETCH(self, rows)
            random.setstate(kept)
        return batch

    def indices(sampler: torch.utils.data.RandomSampler) -> Iterator[int]:
        return iter(range(len(sampler.data_source)))  # type: ignore[arg-type]

    def drawn_apart(sampler: torch.utils.data.RandomSampler, *args: Any, **options: Any) -> None:
        INIT(sampler, *args, **options)
        sampler.generator = torch.Generator()

    fetcher.fetch = fetch
    if state().num_processes > 1 or "IN_ORDER" in os.environ:
        torch.utils.data.RandomSampler.__init__ = drawn_apart  # type: ignore[method-assign]
        torch.utils.data.RandomSampler.__iter__ = indices  # type: ignore[method-assign]


FETCH = torch.utils.data._utils.fetch._MapDatasetFetcher.fetch
INIT = torch.utils.data.RandomSampler.__init__


def run_script(folder: Path, script: str, **options: Any) -> Result:
    """Run a script in ``folder``, with an option for each keyword."""
    words = []
    for name, value in options.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    place = (EXAMPLES / script).resolve()
    models: list[nn.Module] = []
    accelerators: list[Any] = []
    found.clear()
    read_alike()
    with (
        contextlib.chdir(folder),
        observed(models, accelerators),
        mock.patch.object(sys, "argv", [str(place), *words]),
        mock.patch.object(sys, "path", [str(place.parent), *sys.path]),
    ):
        runpy.run_path(str(place), run_name="__main__")
    weights = {
        f"{number}.{name}": value
        for number, model in enumerate(models)
        for name, value in accelerators[0].get_state_dict(model).items()
    }
    return [*found], weights


def inputs(folder: Path, write: Callable[[Path], object]) -> None:
    """Let the main process write the inputs."""
    if state().is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder)
    state().wait_for_everyone()


def words_of(folder: Path) -> Any:
    whole = tokenizer()
    whole.add_special_tokens(
        {"mask_token": "<mask>", "bos_token": "<s>", "cls_token": "<cls>", "sep_token": "<sep>"}
    )
    whole.model_max_length = 32
    whole.save_pretrained(folder)
    return whole


SMALL: dict[str, Any] = {
    "vocab_size": 72,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


SMALL_T5: dict[str, Any] = {
    "vocab_size": 72,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}


def model_in(folder: Path, make: Callable[[Any], nn.Module], config: Any) -> Path:
    transformers.set_seed(0)
    make(config).save_pretrained(folder / "model")
    words_of(folder / "model")
    return folder / "model"


def lines(place: Path, rows: list[Any]) -> None:
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))


SHORT: dict[str, Any] = {
    "model_name_or_path": "model",
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "learning_rate": 1e-3,
    "num_train_epochs": 2,
    "output_dir": "out",
    "seed": 3,
    "checkpointing_steps": 3,
    "with_tracking": True,
    "report_to": "tensorboard",
}


def again(run: Callable[..., Result], folder: Path, checkpoint: str) -> Result:
    """The run that goes on from a checkpoint that the cell before left."""
    origin = folder.parent / folder.name.replace("_resumed", "") / "out" / checkpoint
    inputs(folder, lambda folder: shutil.copytree(origin, folder / "out" / checkpoint))
    return run(folder, resume_from_checkpoint=checkpoint if "-" in checkpoint else f"out/{checkpoint}")


def resumable(checkpoint: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """A cell, and one of the run that goes on from this checkpoint of it."""

    def register(run: Callable[..., Result]) -> Callable[..., Result]:
        CELLS[f"{run.__name__}_resumed"] = lambda folder: again(run, folder, checkpoint)
        return cell(run)

    return register


@resumable("step_3")
def glue(folder: Path, **options: Any) -> Result:
    def write(folder: Path) -> None:
        model_in(folder, transformers.BertForSequenceClassification, transformers.BertConfig(**SMALL))
        for name, count in (("train", 24), ("validation", 10)):
            texts = sentences(count, 3, 8, len(name))
            rows = [{"sentence1": text, "label": len(text) % 2} for text in texts]
            lines(folder / f"{name}.json", rows)

    inputs(folder, write)
    return run_script(
        folder,
        f"{TRANSFORMERS}/text-classification/run_glue_no_trainer.py",
        train_file="train.json",
        validation_file="validation.json",
        **SHORT | options,
    )


@cell
def glue_accumulated(folder: Path) -> Result:
    return glue(folder, gradient_accumulation_steps=2)


@resumable("step_3")
def clm(folder: Path, **options: Any) -> Result:
    def write(folder: Path) -> None:
        config = transformers.GPT2Config(
            vocab_size=72,
            n_positions=64,
            n_embd=16,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        model_in(folder, transformers.GPT2LMHeadModel, config)
        for name, count in (("train", 80), ("validation", 30)):
            (folder / f"{name}.txt").write_text("\n".join(sentences(count, 4, 9, count)))

    inputs(folder, write)
    return run_script(
        folder,
        f"{TRANSFORMERS}/language-modeling/run_clm_no_trainer.py",
        train_file="train.txt",
        validation_file="validation.txt",
        block_size=16,
        gradient_accumulation_steps=2,
        **SHORT | options,
    )


@resumable("step_3")
def mlm(folder: Path, **options: Any) -> Result:
    def write(folder: Path) -> None:
        model_in(folder, transformers.BertForMaskedLM, transformers.BertConfig(**SMALL))
        for name, count in (("train", 48), ("validation", 18)):
            (folder / f"{name}.txt").write_text("\n".join(sentences(count, 4, 9, count)))

    inputs(folder, write)
    return run_script(
        folder,
        f"{TRANSFORMERS}/language-modeling/run_mlm_no_trainer.py",
        train_file="train.txt",
        validation_file="validation.txt",
        line_by_line="1",
        max_seq_length=16,
        gradient_accumulation_steps=2,
        **SHORT | options,
    )


@resumable("step_3")
def translation(folder: Path, **options: Any) -> Result:
    def write(folder: Path) -> None:
        model_in(folder, transformers.T5ForConditionalGeneration, transformers.T5Config(**SMALL_T5))
        for name, count in (("train", 24), ("validation", 10)):
            pairs = zip(sentences(count, 3, 8, 1), sentences(count, 3, 8, 2), strict=True)
            lines(folder / f"{name}.json", [{"translation": {"en": one, "fr": two}} for one, two in pairs])

    inputs(folder, write)
    return run_script(
        folder,
        f"{TRANSFORMERS}/translation/run_translation_no_trainer.py",
        train_file="train.json",
        validation_file="validation.json",
        source_lang="en",
        target_lang="fr",
        max_source_length=16,
        max_target_length=8,
        num_beams=2,
        **SHORT | options,
    )


@resumable("step_2")
def image_classification(folder: Path, **options: Any) -> Result:
    def write(folder: Path) -> None:
        from PIL import Image

        config = transformers.ViTConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=16,
            patch_size=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        transformers.set_seed(0)
        transformers.ViTForImageClassification(config).save_pretrained(folder / "model")
        transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder / "model")
        for split, count in (("train", 24), ("validation", 10)):
            for number, picture in enumerate(Pictures(count).pictures):
                place = folder / "pictures" / split / "ab"[number % 2] / f"{number}.png"
                place.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray((picture * 255).byte().permute(1, 2, 0).numpy()).save(place)

    # It has a data set by default, which goes before folders of files.
    inputs(folder, write)
    return run_script(
        folder,
        f"{TRANSFORMERS}/image-classification/run_image_classification_no_trainer.py",
        dataset_name="pictures",
        ignore_mismatched_sizes=True,
        **SHORT | {"checkpointing_steps": 2} | options,
    )


DIFFUSERS = "diffusers/examples"


def pipeline_in(folder: Path) -> None:
    """A tiny pipeline of Stable Diffusion, and pictures with captions."""
    from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from PIL import Image

    transformers.set_seed(0)
    vocabulary = ["<|startoftext|>", "<|endoftext|>", *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary += [f"{letter}</w>" for letter in "abcdefghijklmnopqrstuvwxyz"]
    (folder / "words").mkdir()
    (folder / "words" / "vocab.json").write_text(json.dumps({w: n for n, w in enumerate(vocabulary)}))
    (folder / "words" / "merges.txt").write_text("#version: 0.2\n")
    text = transformers.CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    StableDiffusionPipeline(
        vae=AutoencoderKL(
            block_out_channels=(8,) * 4,
            norm_num_groups=4,
            latent_channels=4,
            sample_size=16,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
        ),
        text_encoder=transformers.CLIPTextModel(text),
        tokenizer=transformers.CLIPTokenizer(
            str(folder / "words" / "vocab.json"), str(folder / "words" / "merges.txt"), model_max_length=16
        ),
        unet=UNet2DConditionModel(
            sample_size=16,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            cross_attention_dim=16,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            attention_head_dim=4,
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ),
        scheduler=DDPMScheduler(num_train_timesteps=40),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder / "model")
    (folder / "pictures").mkdir()
    rows = []
    for number, picture in enumerate(Pictures(24).pictures):
        name = f"{number:02}.png"
        Image.fromarray((picture * 255).byte().permute(1, 2, 0).numpy()).save(folder / "pictures" / name)
        rows.append({"file_name": name, "text": "abcdefgh"[number % 8 :]})
    lines(folder / "pictures" / "metadata.jsonl", rows)


DRAWN: dict[str, Any] = {
    "pretrained_model_name_or_path": "model",
    "resolution": 16,
    "train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    # Adam turns rounding of small gradients into more.
    "adam_epsilon": 1e-2,
    "max_train_steps": 6,
    "checkpointing_steps": 3,
    "output_dir": "out",
    "seed": 3,
}


def diffusers_run(folder: Path, script: str, **options: Any) -> Result:
    inputs(folder, pipeline_in)
    return run_script(folder, f"{DIFFUSERS}/{script}", **DRAWN | options)


@resumable("checkpoint-3")
def text_to_image_lora(folder: Path, **options: Any) -> Result:
    return diffusers_run(
        folder,
        "text_to_image/train_text_to_image_lora.py",
        train_data_dir="pictures",
        random_flip=True,
        validation_prompt="abc",
        num_validation_images=1,
        **options,
    )


@resumable("checkpoint-3")
def text_to_image(folder: Path, **options: Any) -> Result:
    return diffusers_run(
        folder, "text_to_image/train_text_to_image.py", train_data_dir="pictures", use_ema=True, **options
    )


@resumable("checkpoint-3")
def dreambooth_lora(folder: Path, **options: Any) -> Result:
    return diffusers_run(
        folder,
        "dreambooth/train_dreambooth_lora.py",
        instance_data_dir=str(in_files(folder / "instances", 24)),
        instance_prompt="abc",
        **options,
    )


@resumable("checkpoint-3")
def textual_inversion(folder: Path, **options: Any) -> Result:
    return diffusers_run(
        folder,
        "textual_inversion/textual_inversion.py",
        train_data_dir=str(in_files(folder / "instances", 12)),
        placeholder_token="xyz",
        initializer_token="a",
        repeats=2,
        save_steps=3,
        **options,
    )


@resumable("checkpoint-3")
def controlnet(folder: Path, **options: Any) -> Result:
    def write(folder: Path) -> None:
        import datasets

        pipeline_in(folder)
        rows = datasets.load_dataset("imagefolder", data_dir=str(folder / "pictures"), split="train")
        same = rows.select_columns("image").rename_column("image", "conditioning_image")
        (folder / "controlled").mkdir()
        datasets.concatenate_datasets([rows, same], axis=1).to_parquet(
            folder / "controlled" / "train.parquet"
        )

    inputs(folder, write)
    return run_script(
        folder, f"{DIFFUSERS}/controlnet/train_controlnet.py", train_data_dir="controlled", **DRAWN | options
    )


@resumable("checkpoint-4")
def train_unconditional(folder: Path, **options: Any) -> Result:
    def write(folder: Path) -> None:
        from diffusers import UNet2DModel

        pipeline_in(folder)
        UNet2DModel(
            sample_size=16,
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            attention_head_dim=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ).save_config(folder / "unet")

    inputs(folder, write)
    transformers.set_seed(3 + state().process_index)
    return run_script(
        folder,
        f"{DIFFUSERS}/unconditional_image_generation/train_unconditional.py",
        train_data_dir="pictures",
        model_config_name_or_path="unet",
        output_dir="out",
        resolution=16,
        train_batch_size=2,
        eval_batch_size=2,
        num_epochs=2,
        gradient_accumulation_steps=2,
        use_ema=True,
        ddpm_num_steps=20,
        ddpm_num_inference_steps=2,
        save_images_epochs=1,
        save_model_epochs=1,
        checkpointing_steps=4,
        random_flip=True,
        learning_rate=1e-3,
        lr_warmup_steps=2,
        **options,
    )


PEFT = "peft/examples"


@resumable("step_3")
def feature_extraction(folder: Path, **options: Any) -> Result:
    def write(folder: Path) -> None:
        model_in(
            folder, transformers.BertModel, transformers.BertConfig(**SMALL | {"max_position_embeddings": 80})
        )
        (folder / "products").mkdir()
        for name, count in (("train", 32), ("validation", 10)):
            pairs = zip(sentences(count, 3, 8, 1), sentences(count, 3, 8, 2), strict=True)
            rows = [
                {"query": one, "product_title": two, "relevance_label": len(one + two) % 2}
                for one, two in pairs
            ]
            lines(folder / "products" / f"{name}.jsonl", rows)

    inputs(folder, write)
    return run_script(
        folder,
        f"{PEFT}/feature_extraction/peft_lora_embedding_semantic_search.py",
        dataset_name="products",
        use_peft=True,
        gradient_accumulation_steps=2,
        **SHORT | options,
    )


@cell
def prompt_tuning(folder: Path) -> Result:
    def write(folder: Path) -> None:
        model_in(folder, transformers.BertForSequenceClassification, transformers.BertConfig(**SMALL))
        (folder / "glue").mkdir()
        for name, count in (("train", 24), ("validation", 10)):
            pairs = zip(sentences(count, 3, 8, 1), sentences(count, 3, 8, 2), strict=True)
            rows = [
                {"sentence1": one, "sentence2": two, "label": len(one) % 2, "idx": number}
                for number, (one, two) in enumerate(pairs)
            ]
            lines(folder / "glue" / f"{name}.jsonl", rows)
        (folder / "glue" / "README.md").write_text(
            "---\nconfigs:\n- config_name: mrpc\n  data_files:\n  - split: train\n    path: train.jsonl\n"
            "  - split: validation\n    path: validation.jsonl\n---\n"
        )

    inputs(folder, write)
    return run_script(
        folder,
        f"{PEFT}/sequence_classification/peft_no_lora_accelerate.py",
        peft_type="prompt_tuning",
        num_virtual_tokens=4,
        **{name: SHORT[name] for name in list(SHORT)[:7]},
    )


@cell
def conditional_generation(folder: Path) -> Result:
    """It calls backward of the loss itself."""

    def write(folder: Path) -> None:
        model = model_in(folder, transformers.T5ForConditionalGeneration, transformers.T5Config(**SMALL_T5))
        model.rename(folder / "t5-base")
        data = folder / "temp" / "data" / "FinancialPhraseBank-v1.0"
        data.mkdir(parents=True)
        for name, count in (("train", 64), ("val", 20)):
            rows = [{"sentence": text, "label": text.split()[0]} for text in sentences(count, 3, 8, count)]
            lines(data / f"financial_phrase_bank_{name}.jsonl", rows)

    inputs(folder, write)
    transformers.set_seed(3)
    return run_script(folder, f"{PEFT}/conditional_generation/peft_lora_seq2seq_accelerate_fsdp.py")


@cell
def lora_dreambooth(folder: Path) -> Result:
    inputs(folder, pipeline_in)
    return run_script(
        folder,
        f"{PEFT}/lora_dreambooth/train_dreambooth.py",
        instance_data_dir=str(in_files(folder / "instances", 16)),
        instance_prompt="abc",
        use_lora=True,
        train_text_encoder=True,
        no_tracemalloc=True,
        # Several processes accumulate no gradients there while the text encoder trains.
        **DRAWN | {"gradient_accumulation_steps": 1},
    )
