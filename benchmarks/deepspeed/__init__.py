"""DeepSpeed with its traffic compressed, beside DeepSpeed on gloo: steps on emulated networks, and losses."""
