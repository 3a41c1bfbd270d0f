"""The side of a ps task."""
