"""Engines: what runs one model. `base` is the contract, `process` supervises, `host` runs inside the child."""
