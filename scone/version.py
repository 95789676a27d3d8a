"""The version of the three packages; artifacts record it."""

VERSION = "0.1.0"
