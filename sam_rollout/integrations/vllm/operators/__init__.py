"""Checks that verifying several tokens at a time gives the same logits as decoding them singly."""
