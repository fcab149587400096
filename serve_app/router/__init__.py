"""The Router deployment: the front door, and the way of a request to its engine and back."""
