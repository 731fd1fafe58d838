"""Measurements of this library beside what users would pick instead. Not installed with it."""
