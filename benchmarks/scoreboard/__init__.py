"""Which method brings a training to a loss first, on which network: losses by steps, times seconds by step."""
