"""Models to train out of the box. Any nn.Module works; these are small enough to read."""
