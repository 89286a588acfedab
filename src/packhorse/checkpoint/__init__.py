"""Checkpoints: safetensors and a JSON manifest, complete or absent, checked byte by byte, and never unpickled."""

from packhorse.checkpoint.newest import newest_checkpoint
from packhorse.checkpoint.read import read_checkpoint, verify_checkpoint
from packhorse.checkpoint.step import load, save
from packhorse.checkpoint.write import prune_checkpoints, write_checkpoint

__all__ = ["load", "newest_checkpoint", "prune_checkpoints", "read_checkpoint", "save", "verify_checkpoint", "write_checkpoint"]
