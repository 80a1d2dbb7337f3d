"""The version of this package, in its one place."""

VERSION = "0.1.0"
