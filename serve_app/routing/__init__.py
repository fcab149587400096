"""PURE. From a request's body to a decision: which model answers, and whether it thinks first."""
