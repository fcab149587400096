"""Measured claims: each module runs one comparison and says whether the claim holds."""
