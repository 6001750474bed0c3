"""How 8-bit floating point training is described. ``mixed_precision="fp8"`` trains by torchao.

Each description needs the package that it is for, and is refused without it. TransformerEngine's is for scripts that
apply it to a model themselves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from lockstep.config.enums import PrecisionType, StringEnum
from lockstep.config.handlers import KwargsHandler
from lockstep.config.sources import inherited_environment
from lockstep.config.values import parse_bool
from lockstep.errors import ConfigError, MissingExtraError

PREFIX = "ACCELERATE_FP8_"


class FP8BackendType(StringEnum):
    """The packages that compute in 8-bit floating point, as Accelerate names them. Here ``AO`` (torchao) trains
    models.

    Examples:
        ```python
        from lockstep import Accelerator
        from lockstep.utils import FP8BackendType

        assert Accelerator().fp8_backend == FP8BackendType.NO  # without mixed_precision="fp8"
        ```
    """

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


def _variable(name: str, default: str) -> str:
    return inherited_environment().get(f"{PREFIX}{name}", default)


def _require_package(name: str, package: str) -> None:
    if find_spec(package) is None:
        raise ImportError(f"{name} needs the package '{package}'. Install it with: pip install {package}")


@dataclass
class AORecipeKwargs(KwargsHandler):
    """How the package torchao converts linear layers for ``mixed_precision="fp8"``.

    Args:
        config: A ``torchao.float8.Float8LinearConfig``, in place of the two switches below.
        module_filter_func: A function (linear layer, its name) -> whether it is converted. None: all layers with
            sizes that are divisible by 16, except the first and the last one.
        pad_inner_dim: Pad sizes that are not divisible by 16. None: ``ACCELERATE_FP8_PAD_INNER_DIM``, or else True.
        enable_fsdp_float8_all_gather: It has no effect here, and a warning says so. Sharded weights are gathered in
            bfloat16 and cast afterwards. None: ``ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER``, or else True.

    Raises:
        ImportError: torchao is not installed.

    Examples:
        ```python
        from torchao.float8 import Float8LinearConfig
        from lockstep import Accelerator
        from lockstep.utils import AORecipeKwargs

        recipe = AORecipeKwargs(config=Float8LinearConfig(emulate=True))  # without a GPU that has 8-bit floats
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
        assert accelerator.ao_recipe_handler is recipe
        ```
    """

    config: Any = None
    module_filter_func: Callable[..., bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        _require_package("AORecipeKwargs", "torchao")
        if self.enable_fsdp_float8_all_gather or getattr(self.config, "enable_fsdp_float8_all_gather", False):
            warnings.warn(
                "enable_fsdp_float8_all_gather=True has no effect: sharded weights are gathered in bfloat16, "
                "and cast to fp8 afterwards. Leave it out.",
                stacklevel=3,
            )
        if self.config is not None:
            return
        from torchao.float8 import Float8LinearConfig

        for name in ("pad_inner_dim", "enable_fsdp_float8_all_gather"):
            if getattr(self, name) is None:
                setattr(self, name, parse_bool(_variable(name.upper(), "True"), name))
        self.config = Float8LinearConfig(
            pad_inner_dim=self.pad_inner_dim, enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather
        )


@dataclass
class TERecipeKwargs(KwargsHandler):
    """How NVIDIA's TransformerEngine scales 8-bit floating point numbers: a description, by which nothing computes.

    ``mixed_precision="fp8"`` trains by torchao here; see ``AORecipeKwargs``.

    Args:
        use_autocast_during_eval: Compute in 8 bits in evaluation too.
        margin: The scale is lowered by a factor of 2 ** margin.
        interval: The number of steps from one change of the scale to the next.
        fp8_format: ``"E4M3"``, ``"E5M2"`` or ``"HYBRID"`` (E4M3 in forward, E5M2 for gradients).
        amax_history_len: The number of steps whose largest values are remembered.
        amax_compute_algo: ``"most_recent"`` or ``"max"``: which of them sets the scale.
        override_linear_precision: Three truth values: whether forward, the gradient of the input, and the gradient of
            the weight are computed in a wider type.
        use_mxfp8_block_scaling: Scale blocks of 32 numbers (MXFP8).

    Raises:
        ImportError: transformer_engine is not installed.

    Examples:
        ```python
        from lockstep.utils import TERecipeKwargs

        recipe = TERecipeKwargs(fp8_format="HYBRID", amax_history_len=16)
        assert recipe.fp8_format == "HYBRID"
        ```
    """

    use_autocast_during_eval: bool = False
    margin: int = 0
    interval: int = 1
    fp8_format: str = "HYBRID"
    amax_history_len: int = 1024
    amax_compute_algo: str = "most_recent"
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    use_mxfp8_block_scaling: bool = False

    def __post_init__(self) -> None:
        _require_package(type(self).__name__, "transformer_engine")


@dataclass
class FP8RecipeKwargs(TERecipeKwargs):
    """The former name of ``TERecipeKwargs``, with the same fields. Using it warns.

    Args:
        use_autocast_during_eval: This field and those below are those of ``TERecipeKwargs``.
        margin: See there.
        interval: See there.
        fp8_format: See there.
        amax_history_len: See there.
        amax_compute_algo: See there.
        override_linear_precision: See there.
        use_mxfp8_block_scaling: See there.
        backend: ``"TE"``.

    Raises:
        ImportError: transformer_engine is not installed.

    Examples:
        ```python
        from lockstep.utils import FP8RecipeKwargs

        recipe = FP8RecipeKwargs(backend="TE", fp8_format="E4M3")
        assert recipe.backend == "TE"
        ```
    """

    backend: str = "TE"

    def __post_init__(self) -> None:
        warnings.warn(
            "FP8RecipeKwargs is the old name of TERecipeKwargs. Use the new name.",
            FutureWarning,
            stacklevel=3,
        )
        super().__post_init__()


def recipe_of(given: KwargsHandler | None, precision: str) -> AORecipeKwargs | None:
    """Return how models are converted; None: they are not. ``given`` is what a script passed.

    Raises:
        ConfigError: another package than torchao is asked for, or a recipe without ``mixed_precision="fp8"``.
        MissingExtraError: torchao is not installed.
    """
    if precision != PrecisionType.FP8:
        if given is not None:
            raise ConfigError(
                f"kwargs_handlers has {type(given).__name__}, but mixed_precision={precision!r}. Pass "
                "mixed_precision='fp8', or remove it."
            )
        return None
    asked = type(given).__name__ if given is not None else f"{PREFIX}BACKEND={_variable('BACKEND', 'AO')}"
    if isinstance(given, TERecipeKwargs) or (
        given is None and _variable("BACKEND", "AO").upper() not in ("AO", "TORCHAO", "NO")
    ):
        raise ConfigError(
            f"{asked} asks for another package than torchao, but mixed_precision='fp8' uses torchao. Install "
            "torchao, and pass AORecipeKwargs() in kwargs_handlers."
        )
    if find_spec("torchao") is None:
        raise MissingExtraError("mixed_precision='fp8'", "torchao", "torchao")
    assert given is None or isinstance(given, AORecipeKwargs)
    return given or AORecipeKwargs()
