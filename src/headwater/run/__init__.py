"""Runs a step: memory for KV blocks, packed batches, the model, sampling."""
