"""One configuration file -> a trained model, through the planned step. `start.train` is the way in."""
