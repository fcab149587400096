"""Tells of every change of a model's state, with the time that the model was in the one before."""

from __future__ import annotations

from collections.abc import Callable

from serve_app.residency.events import Stage, Transition


class Transitions:
    """`went` is called for each."""

    def __init__(self, went: Callable[[Transition], None], clock: Callable[[], float]) -> None:
        self._went = went
        self._clock = clock
        # The state of each model that was ever up, and since when.
        self._states: dict[str, tuple[str, float]] = {}

    def note(self, model: str, state: str) -> None:
        """The model is in this state now, perhaps still."""
        now = self._clock()
        was, since = self._states.get(model, (Stage.STOPPED.value, now))
        if state != was:
            self._states[model] = state, now
            self._went(Transition(model, was, state, now - since))
