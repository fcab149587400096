"""What the configuration offers to clients: models by every name they answer to. Pure data."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from serve_app.config import Config
from serve_app.model_schema import Model

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


def allowing(catalog: Catalog, ids: Collection[str]) -> Catalog:
    """What a key that may use only these models sees; the first of them answers `auto` where the default may not."""
    models = {model_id: model for model_id, model in catalog.models.items() if model_id in ids}
    names = {name: model_id for name, model_id in catalog.names.items() if model_id in models}
    residents = [model.id for model in models.values() if model.tier == "resident"]
    first = next(iter(residents or models), catalog.default_id)
    return Catalog(models, names, catalog.default_id if catalog.default_id in models else first)


def catalog_of(config: Config) -> Catalog:
    """The catalog of a valid configuration."""
    return Catalog(
        models={model.id: model for model in config.models},
        names={name: model.id for model in config.models for name in (model.id, *model.aliases)},
        default_id=config.residents[0].id,
    )
