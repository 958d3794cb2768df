"""Benchmarks: each script compares programs side by side and writes CSV rows to benchmarks/results."""
