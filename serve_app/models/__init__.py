"""The deployments that run models, and how the Router knows and chooses their replicas."""
