"""A family: how its configuration becomes a ModelSpec, and how its tensors are called."""
