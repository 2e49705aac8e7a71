"""Planning: measures the costs of steps, predicts the costs of plans, and finds plans from both."""
