"""Repeats items by their receipts, and compares the tokens."""
