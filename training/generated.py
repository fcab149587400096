"""Training rows made by reasoning-gym: puzzles as programs state them, which no person's seeds look like.

The families that `benchmarks/eval_routing.py` shows are not among them.
"""

from __future__ import annotations

import reasoning_gym

from training.rows import Row

PUZZLES = [
    "aiw",
    "arc_1d",
    "boxnet",
    "circuit_logic",
    "dice",
    "futoshiki",
    "game_of_life",
    "graph_color",
    "intermediate_integration",
    "jugs",
    "kakurasu",
    "largest_island",
    "mini_sudoku",
    "n_queens",
    "polynomial_equations",
    "propositional_logic",
    "quantum_lock",
    "rotten_oranges",
    "rush_hour",
    "shortest_path",
    "sokoban",
    "survo",
    "syllogism",
    "time_intervals",
    "tower_of_hanoi",
    "word_ladder",
]
CHORES = [
    "base_conversion",
    "letter_counting",
    "number_sorting",
    "sentence_reordering",
    "spell_backward",
    "word_sorting",
]
_EACH = 11


def generated_rows() -> list[Row]:
    """Puzzles to think about, and chores not to; a family is a topic."""
    made = [(name, 1.0) for name in PUZZLES] + [(name, 0.0) for name in CHORES]
    return [
        Row(
            f"{name}:{number}",
            "en",
            name,
            f"gym-{name}",
            [{"role": "user", "content": item["question"]}],
            [],
            hard,
            hard,
        )
        for name, hard in made
        for number, item in enumerate(reasoning_gym.create_dataset(name, size=_EACH, seed=3))
    ]
