"""The tensors that hold keys and values, and the formats they are written in."""
