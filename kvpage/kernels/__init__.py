"""Tensor operations over blocks, each with one signature."""

from kvpage.kernels.reference import key_norms, move_slots, score_tokens

__all__ = ["key_norms", "move_slots", "score_tokens"]
