"""The sections of the configuration that say how many replicas there may be."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from serve_app.strict import Strict


class Autoscaling(Strict):
    """How many replicas there may be, and how long more or fewer must be wanted before it is done."""

    min_replicas: Annotated[int, Field(ge=1)] = 1
    max_replicas: Annotated[int, Field(ge=1)]
    upscale_delay_s: Annotated[float, Field(ge=0)] = 5
    downscale_delay_s: Annotated[float, Field(ge=0)] = 300

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas: {self.max_replicas} is less than min_replicas: {self.min_replicas}")
        return self


class ResidentAutoscaling(Autoscaling):
    """Replicas of a resident model by its load, tokens or requests, whichever asks for more."""

    target_ongoing_requests: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Requests in flight that one replica should have; null: half of max_ongoing_requests."
    )
    target_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Prompt tokens in flight (estimated) that one replica should have; null: four contexts."
    )


class PoolAutoscaling(Autoscaling):
    """Replicas of the pool by the distinct models that wait and find no room."""

    min_replicas: Annotated[int, Field(ge=0)] = Field(0, description="0: the first request starts the first replica.")
    upscale_delay_s: Annotated[float, Field(ge=0)] = Field(
        1, description="From zero replicas to one it is done at once."
    )
    downscale_delay_s: Annotated[float, Field(ge=0)] = Field(
        60, description="Counts from when no model is awake any more; see idle_unload_s."
    )
