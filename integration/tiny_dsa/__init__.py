"""Tiny random checkpoints of DSA models, and of two models without DSA to compare them with."""

from integration.tiny_dsa.checkpoint import write_checkpoint
from integration.tiny_dsa.spec import ModelKind, Sparsity, TinySpec

__all__ = ["ModelKind", "Sparsity", "TinySpec", "write_checkpoint"]
