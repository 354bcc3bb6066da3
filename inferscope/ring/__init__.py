"""Rings and recordings: how facts leave an observed process and are kept."""
