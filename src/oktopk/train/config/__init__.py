"""The configuration of a run: flags, TOML files and recipes."""
