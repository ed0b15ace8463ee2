"""How fast: `make bench` and what it is made of. Measuring needs a GPU; statistics and records do not."""
