"""Residency policies driven through simulated days: `make sim`. docs/residency.md says what it shows."""
