"""nado: steer language models by any yes/no question about the finished text."""

__version__ = "0.1.0"
