"""Planning: measures what steps cost, predicts what plans would cost, and finds plans by it."""
