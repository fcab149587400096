"""What every part of the configuration is: checked, frozen, and without unknown keys."""

from __future__ import annotations

import re
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

# As a shell or Compose would fill it in.
VARIABLE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")


class Strict(BaseModel):
    """A section of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_it_is_written(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML reads `no` as false, and pydantic would take true for 1; nobody fills in `${HOME}`."""
        if (
            isinstance(value, bool)
            and info.field_name
            and not _takes_bool(cls.model_fields[info.field_name].annotation)
        ):
            raise ValueError("must not be true or false (YAML reads yes, no, on and off so; quote a name)")
        if isinstance(value, str) and (found := VARIABLE.search(value)):
            raise ValueError(f"{found[0]} stays as it is: nothing fills in variables here; write the value")
        return value


def _takes_bool(annotation: Any) -> bool:
    return annotation in (bool, Any) or any(map(_takes_bool, get_args(annotation)))
