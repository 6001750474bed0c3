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
from lockstep.config.sources import inherited_environment, str_to_bool
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


def _flag(name: str, default: str = "False") -> bool:
    return bool(str_to_bool(_variable(name, default)))


def _require_package(name: str, package: str) -> None:
    if find_spec(package) is None:
        raise ImportError(f"{name} needs the package '{package}'. Install it with: pip install {package}")


def _one_of(value: str, name: str, words: tuple[str, ...]) -> str:
    if value not in words:
        raise ConfigError(f"{name} is {value!r}, but must be one of {', '.join(words)}. Use one of them.")
    return value


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
                setattr(self, name, _flag(name.upper(), "True"))
        self.config = Float8LinearConfig(
            pad_inner_dim=self.pad_inner_dim, enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather
        )


@dataclass
class TERecipeKwargs(KwargsHandler):
    """How NVIDIA's TransformerEngine scales 8-bit floating point numbers, as a
    description; nothing here computes by it.

    ``mixed_precision="fp8"`` trains by torchao here; see ``AORecipeKwargs``. A field that is None is read from the
    variable ``ACCELERATE_FP8_<FIELD>``, or has the default that is named below.

    Args:
        use_autocast_during_eval: Compute in 8 bits in evaluation too. Default: False.
        margin: The scale is lowered by a factor of 2 ** margin. Default: 0.
        interval: The number of steps from one change of the scale to the next. Default: 1.
        fp8_format: ``"E4M3"``, ``"E5M2"`` or ``"HYBRID"`` (E4M3 in forward, E5M2 for gradients), which is the
            default.
        amax_history_len: The number of steps whose largest values are remembered. Default: 1024.
        amax_compute_algo: ``"most_recent"`` (the default) or ``"max"``: which of them sets the scale.
        override_linear_precision: Three truth values: whether forward, the gradient of the input, and the gradient of
            the weight are computed in a wider type. Default: ``(False, False, False)``.
        use_mxfp8_block_scaling: Scale blocks of 32 numbers (MXFP8). Default: False.

    Raises:
        ImportError: transformer_engine is not installed.
        ValueError: ``fp8_format`` or ``amax_compute_algo`` is unknown.

    Examples:
        ```python
        from lockstep.utils import TERecipeKwargs

        recipe = TERecipeKwargs(fp8_format="HYBRID", amax_history_len=16)
        assert recipe.fp8_format == "HYBRID"
        ```
    """

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: object = None
    use_mxfp8_block_scaling: bool | None = None

    def __post_init__(self) -> None:
        _require_package(type(self).__name__, "transformer_engine")
        for name, default in (("margin", "0"), ("interval", "1"), ("amax_history_len", "1024")):
            if getattr(self, name) is None:
                setattr(self, name, int(_variable(name.upper(), default)))
        for name in ("use_autocast_during_eval", "use_mxfp8_block_scaling"):
            if getattr(self, name) is None:
                setattr(self, name, _flag(name.upper()))
        word = self.fp8_format or _variable("FORMAT", "HYBRID")
        self.fp8_format = _one_of(word.upper(), "fp8_format", ("E4M3", "E5M2", "HYBRID"))
        word = self.amax_compute_algo or _variable("AMAX_COMPUTE_ALGO", "most_recent")
        self.amax_compute_algo = _one_of(word.lower(), "amax_compute_algo", ("max", "most_recent"))
        if self.override_linear_precision is None:
            self.override_linear_precision = tuple(
                _flag(f"OVERRIDE_{name}") for name in ("FPROP", "DGRAD", "WGRAD")
            )


@dataclass
class _OptLevel:
    opt_level: str | None = None


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, _OptLevel):
    """The former name of ``TERecipeKwargs``, with the same fields. Using it warns.

    Args:
        opt_level: Refused: it belongs to MS-AMP, which is not supported. ``mixed_precision="fp8"`` has no such levels.
        use_autocast_during_eval: This field and those below are those of ``TERecipeKwargs``.
        margin: See there.
        interval: See there.
        fp8_format: See there.
        amax_history_len: See there.
        amax_compute_algo: See there.
        override_linear_precision: See there.
        use_mxfp8_block_scaling: See there.
        backend: ``"TE"``. None: ``ACCELERATE_FP8_BACKEND``, or else ``"TE"``.

    Raises:
        ImportError: transformer_engine is not installed.
        ValueError: ``backend`` is another one, or ``opt_level`` is given.

    Examples:
        ```python
        from lockstep.utils import FP8RecipeKwargs

        recipe = FP8RecipeKwargs(backend="TE", fp8_format="E4M3")
        assert recipe.backend == "TE"
        ```
    """

    backend: str | None = None

    def __post_init__(self) -> None:
        warnings.warn(
            "FP8RecipeKwargs is the old name of TERecipeKwargs. Use the new name.",
            FutureWarning,
            stacklevel=3,
        )
        self.backend = _one_of((self.backend or _variable("BACKEND", "te")).upper(), "backend", ("TE",))
        if self.opt_level is not None:
            raise ConfigError(
                f"opt_level={self.opt_level!r} belongs to MS-AMP, which is not supported. Leave it out, because "
                "mixed_precision='fp8' has no such levels."
            )
        super().__post_init__()


def recipe_of(given: KwargsHandler | None, precision: str) -> AORecipeKwargs | None:
    """How models are converted; None: they are not. ``given`` is what a script passed.

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
