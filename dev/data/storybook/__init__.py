"""The story generator behind dev/data/make_stories.py: random source, language, world and plots."""
