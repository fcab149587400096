"""What the configuration offers to clients: models by every name they answer to. Pure data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from serve_app.config import Config, Model

AUTO = "auto"


@dataclasses.dataclass(frozen=True, slots=True)
class Catalog:
    """The models by id, and every name that stands for one. `default_id` answers `auto`."""

    models: Mapping[str, Model]
    names: Mapping[str, str]
    default_id: str

    def find(self, name: str) -> Model | None:
        """The model that this id or alias stands for."""
        model_id = self.names.get(name)
        return self.models[model_id] if model_id is not None else None


def catalog_of(config: Config) -> Catalog:
    """The catalog of a valid configuration."""
    return Catalog(
        models={model.id: model for model in config.models},
        names={name: model.id for model in config.models for name in (model.id, *model.aliases)},
        default_id=config.residents[0].id,
    )
