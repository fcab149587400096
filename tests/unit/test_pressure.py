"""How loaded a model is, and what is given up at which load. Pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.admission.pressure import Usage, load_of, shrunk_budget, wants_lighter
from serve_app.engines.base import EngineLoad
from serve_app.service_schema import Degrade

SETTINGS = Degrade(shrink_thinking_at=0.8, thinking_budget=500, lighter_model_at=1.0)


@pytest.mark.parametrize(
    ("replicas", "queued", "load"),
    [
        ([], 0, 0.0),
        ([], 9, 0.0),
        ([Usage(0, 8)], 0, 0.0),
        ([Usage(4, 8)], 0, 0.5),
        ([Usage(8, 8), Usage(0, 8)], 0, 0.5),
        ([Usage(8, 8)], 8, 2.0),
        # A cache that is full counts as places that are taken; one with room is enough.
        ([Usage(1, 8, EngineLoad(0.97))], 0, 0.97),
        ([Usage(1, 8, EngineLoad(0.97)), Usage(1, 8, EngineLoad(0.1))], 0, 0.125),
        # One that keeps requests waiting has no place left, whatever the configuration gives it.
        ([Usage(4, 100, EngineLoad(0.97, 3, 1))], 0, 1.0),
        ([Usage(4, 100, EngineLoad(0.97, 3, 1))], 4, 2.0),
        ([Usage(4, 100, EngineLoad(0.97, 3, 1)), Usage(2, 8)], 0, 0.5),
        ([Usage(4, 100, EngineLoad(0.8, 3, 1), 0.75)], 0, 1.0),
        ([Usage(4, 100, EngineLoad(0.8, 3, 1), 0.9)], 0, 0.8),
    ],
)
def test_load_is_taken_places_over_all_places_or_the_emptiest_cache(
    replicas: list[Usage], queued: int, load: float
) -> None:
    assert load_of(replicas, queued) == load


ENGINES = st.builds(EngineLoad, st.floats(0, 1), st.integers(0, 9), st.integers(0, 9))


@given(st.lists(st.builds(Usage, st.integers(0, 9), st.integers(1, 9), ENGINES), min_size=1), st.integers(0, 9))
def test_load_never_falls_when_more_wait(replicas: list[Usage], queued: int) -> None:
    assert 0 <= load_of(replicas, queued) <= load_of(replicas, queued + 1)


@pytest.mark.parametrize(
    ("load", "budget", "left"),
    [(0.79, None, None), (0.79, 9000, 9000), (0.8, None, 500), (0.8, 9000, 500), (3.0, 100, 100), (3.0, 0, 0)],
)
def test_thinking_shrinks_from_its_load_on_and_never_grows(load: float, budget: int | None, left: int | None) -> None:
    assert shrunk_budget(load, budget, SETTINGS) == left


@pytest.mark.parametrize(("load", "lighter"), [(0.0, False), (0.99, False), (1.0, True), (5.0, True)])
def test_lighter_model_is_wanted_where_every_place_is_taken(load: float, lighter: bool) -> None:
    assert wants_lighter(load, SETTINGS) is lighter
