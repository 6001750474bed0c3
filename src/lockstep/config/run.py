"""What a run is, as typed values: the model behind configuration files."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from lockstep.config import checks
from lockstep.config.settings import IN_FILES, Setting
from lockstep.config.values import parse_machines, repr_short
from lockstep.errors import ConfigError


def _field(setting: Setting) -> Any:
    kind = setting.kind
    annotation = kind.type if setting.default is not None else kind.type | None
    default = Field(setting.default, description=setting.meaning or setting.values)
    return Annotated[annotation, BeforeValidator(partial(_read, setting))], default


def _read(setting: Setting, value: object) -> object:
    return setting.default if value is None else setting.kind.as_data(value)


# The base has one field for each setting that files may have.
_Fields: Any = create_model(
    "_Fields", __base__=BaseModel, **{name: _field(setting) for name, setting in IN_FILES.items()}
)


class RunConfig(_Fields):
    """How to start a run: one field for each of ``config.settings.IN_FILES``.

    Raises ``pydantic.ValidationError`` for fields alone and together; ``compat.accelerate.config_file.load``
    turns it into a ConfigError with file, line and key.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _range_of_machines(cls, data: Any) -> object:
        """Read the range of machines: ``num_machines: "1:4"`` says both ends."""
        given = data.get("num_machines") if isinstance(data, dict) else None
        if not isinstance(given, str) or ":" not in given:
            return data
        try:
            least, most = parse_machines(given)
        except ConfigError as error:
            raise ConfigError(f"num_machines: {error}") from None
        if data.get("min_machines") not in (None, least, str(least)):
            raise ConfigError(
                f"num_machines is {given} but min_machines is {repr_short(data['min_machines'])}. Say it once."
            )
        return {**data, "num_machines": most, "min_machines": least}

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        checks.check_topology(self.model_dump())
        return self

    def given(self) -> dict[str, object]:
        """Return the settings that were said, not defaulted."""
        found: dict[str, object] = self.model_dump(exclude_unset=True)
        return found
