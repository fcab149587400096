"""Files and batches: many requests in one file, run when interactive load leaves room, each recorded once."""
