"""Policy and remap in one pass over a decode batch: learned row in, selection and physical rows out."""

from kvplugin.fused.op import apply_and_remap

__all__ = ["apply_and_remap"]
