"""History that the Router keeps: what of it a request is given, what of an answer is kept, and where."""
