"""Tensor operations over blocks, each with one signature."""

from kvpage.kernels.reference import move_slots, score_tokens

__all__ = ["move_slots", "score_tokens"]
