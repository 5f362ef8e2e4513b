"""Speculation: guesses of the next tokens, verified by the model in the step that computes them."""
