"""The command line: python -m magneto run | explain | report | bench | env | cache."""
