"""Benchmarks, and the stand-ins for a real store that benchmarks and tests share."""
