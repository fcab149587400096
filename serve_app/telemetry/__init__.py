"""What operators see of decisions: counters, spans, the shadow record. A request pays microseconds for it."""
