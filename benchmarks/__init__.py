"""Measures speed: ratios, side by side in one run, interleaved, medians."""
