"""Measurements against eager and torch.compile: `python -m benchmarks.run`, `.overhead`, `.demo`."""
