"""Workers of an elastic job are killed and others come, while it trains: stalls, steps per second, bits and losses."""
