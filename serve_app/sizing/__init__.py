"""Whether a model fits a GPU: from its `config.json`, without running it."""
