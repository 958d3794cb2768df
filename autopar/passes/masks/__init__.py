"""Recognises masks of attention: causal, sliding windows, documents."""
