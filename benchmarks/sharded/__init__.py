"""Steps of sharded training between two nodes: torch's FSDP2, and what compresses its weights and gradients."""
