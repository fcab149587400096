"""Which lazy models are in memory: `policy` decides (pure), `manager` carries it out."""
