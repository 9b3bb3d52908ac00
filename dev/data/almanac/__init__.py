"""The generator behind dev/data/make_almanac.py: a world of coined names with fixed facts, and documents about it."""
