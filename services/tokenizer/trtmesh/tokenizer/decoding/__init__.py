"""The sequences of a stream: their tokens become text that ends at a stop text."""
