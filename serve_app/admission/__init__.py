"""Who gets in, who waits and who is refused: pure decisions, and what carries them out."""
