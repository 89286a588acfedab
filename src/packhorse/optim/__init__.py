"""Elementwise optimizers: the description of torch.optim's, and of yours (elementwise.py)."""

from packhorse.optim.elementwise import Elementwise, Needs
from packhorse.optim.table import OPTIMIZERS

__all__ = ["OPTIMIZERS", "Elementwise", "Needs"]
