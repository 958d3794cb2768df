"""Benchmarks: each script compares side by side and writes CSV rows to benchmarks/results."""
