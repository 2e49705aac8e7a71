"""What README and docs show of the result files: tables, pictures, and figures in sentences."""
