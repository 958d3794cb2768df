"""Benchmarks: each script compares programs and writes CSV rows to benchmarks/results."""
